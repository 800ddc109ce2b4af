"""The training that is exported, with every value that it had, before any library's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import NO_CONDITION, PARTIAL_CREDIT
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trials import Params
from gdpo_tune.policies.load_policy import list_end_tokens, read_own_decoding, read_position_limit
from gdpo_tune.policies.prompt_choice import list_own_tags, load_local_tokenizer, read_chat_template
from gdpo_tune.results.retrain import TrainingRequest
from gdpo_tune.spec import SweepSpec

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("num_beams", "num_return_sequences"), 1),
    **{key: [] for key in ("suppress_tokens", "begin_suppress_tokens")},
    **dict.fromkeys(("top_h", "bad_words_ids", "sequence_bias", "forced_eos_token_id")),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings", "max_time")),
}
"""Setting that `generate` of Transformers reads from the policy if a call leaves it out -> its
neutral value; None if it has none."""

AUTO_TOKENS = 2**15
"""Tokens of full length in a micro-batch where a training here chooses their number itself."""


@dataclass(frozen=True)
class ExportedReward:
    """One reward of the training."""

    name: str
    weight: float
    """The largest of a setup is 1, as in training."""
    low: float
    high: float
    """Range of its values, infinite if it is unknown."""
    shaping: tuple[str, ...]
    """Changes before the normalization, one sentence each."""


@dataclass(frozen=True)
class TrainingSetup:
    """One training."""

    request: TrainingRequest
    name: str
    """Sweep and choice, such as `code-knee`."""
    note: str
    """Origin, for a person."""
    policy: str
    """Argument of `from_pretrained`: the policy from which the training starts."""
    is_chat: bool
    """True if the policy reads prompts through its chat template, or is not on this machine."""
    context_length: int | None
    """Tokens that the policy can read and write, if that is known."""
    own_decoding: Mapping[str, Any] | None
    """Settings of the policy's own generation config; None if it is not on this machine."""
    end_tokens: tuple[int, ...]
    """Tokens that end a completion, the tokenizer's first; empty if they are not known."""
    rewards: tuple[ExportedReward, ...]
    """Those with a weight, in the order of the task; none of a merge, whose `params` are empty."""

    @property
    def spec(self) -> SweepSpec:
        """Every setting of the training."""
        return self.request.spec

    @property
    def params(self) -> Params:
        """Every parameter of the training."""
        return self.request.params

    @property
    def mode(self) -> str:
        """Normalization: how rewards become advantages."""
        return str(self.params["normalization"])

    @property
    def sums_first(self) -> bool:
        """True if the weighted rewards are summed before the normalization."""
        return registry.NORMALIZATIONS[self.mode].sums_first

    @property
    def loss(self) -> str:
        """Loss aggregation (`loss_type`)."""
        return str(self.params["loss_type"])

    @property
    def group_size(self) -> int:
        """Completions of one prompt."""
        return int(self.params["group_size"])

    @property
    def prompts_per_step(self) -> int:
        """Groups in a step."""
        return self.spec.training.completions_per_step // self.group_size

    @property
    def passes_per_step(self) -> int:
        """Passes over the samples of a step."""
        return int(self.params["num_iterations"])

    @property
    def mini_batch_size(self) -> int:
        """Completions of an optimizer step."""
        return self.spec.training.mini_batch_size or self.spec.training.completions_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of a step."""
        return self.passes_per_step * self.spec.training.mini_batches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the training."""
        return self.spec.training.steps * self.updates_per_step

    @property
    def prompt_format_arguments(self) -> dict[str, object]:
        """Arguments of `PromptFormat` besides tokenizer and instructions."""
        kwargs, date = dict(self.spec.model.chat_template_kwargs), self.spec.model.template_date
        tags = list_own_tags(self.build_task().instructions)
        return {"tags": tags, "template_kwargs": kwargs, "date": date}

    @property
    def own_settings(self) -> list[str]:
        """Keys of `NEUTRAL` that the policy's files set, or may set; vLLM takes none."""
        own = self.own_decoding
        if self.spec.rollout.engine == "vllm":
            return []
        return [k for k, v in NEUTRAL.items() if own is None or own.get(k) not in (None, v)]

    @property
    def warmup_optimizer_steps(self) -> int:
        """Optimizer steps over which the learning rate rises."""
        return self.spec.training.warmup_steps * self.updates_per_step

    @property
    def micro_batch_size(self) -> int:
        """Completions in one forward and backward pass, a divisor of the mini-batch."""
        most = self.spec.training.micro_batch_size or self.mini_batch_size
        if most == "auto":
            most = max(1, AUTO_TOKENS // self.max_sequence_length)
        sizes = range(min(most, self.mini_batch_size), 0, -1)
        return next(size for size in sizes if self.mini_batch_size % size == 0)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.mini_batch_size // self.micro_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a prompt and its completion."""
        longest = self.spec.data.max_prompt_length + self.spec.training.max_completion_length
        return min(longest, self.context_length or longest)

    @property
    def lora_alpha(self) -> float:
        """Scale of the adapters, an int if whole; a setting of 0 stands for twice the rank."""
        scale = self.spec.model.lora_alpha or 2 * self.spec.model.lora_rank
        return round(scale) if scale == round(scale) else scale

    @property
    def leaves_one_out(self) -> bool:
        """True if a reward is compared with the others of its group, and that has an effect."""
        ignored = "baseline" in registry.NORMALIZATIONS[self.mode].ignores
        return self.params.get("baseline") == "leave_one_out" and not ignored

    @property
    def gamma(self) -> float:
        """Saturation exponent, 0 if the mode ignores it."""
        ignored = "gamma" in registry.NORMALIZATIONS[self.mode].ignores
        return 0.0 if ignored else float(self.params.get("gamma", 0.0))

    @property
    def weights(self) -> list[float]:
        """Weights of the rewards."""
        return [reward.weight for reward in self.rewards]

    def build_task(self) -> Any:
        """Build the task, which gives the prompts and scores completions."""
        spec = self.spec
        settings = spec.training, spec.sandbox, spec.data, self.params, spec.scoring
        return build_task(spec.task, *settings)

    def list_extras(self, *adapters: str) -> list[str]:
        """Return those of a package's extras that it needs: `adapters`, and that of the engine."""
        extras = list(adapters) if self.spec.model.lora_rank else []
        return extras + ["vllm"] * (self.spec.rollout.engine == "vllm")

    def get_number(self, name: str) -> float:
        """Return a parameter that is a number."""
        return float(self.params[name])


def build_training_setup(request: TrainingRequest, policy: str) -> TrainingSetup:
    """Build the setup of a training with complete parameters; `policy` is for `from_pretrained`."""
    if request.start:  # it has no revisions
        model = request.spec.model.replace(revision="")
        request = replace(request, spec=request.spec.replace(model=model))
    spec, params, place = request.spec, request.params, request.sweep or request.note
    shown = Path(place).name if place.startswith("/") else place
    info = load_task_info(spec.task, params)
    weights = {name: float(params.get(f"reward_weights.{name}", 0.0)) for name in info.rewards}
    largest = max(weights.values())
    names = [name for name, weight in weights.items() if weight > 0]
    shaping = {name: _describe_shaping(name, info, params, spec) for name in names}
    origin = str(request.start or spec.policy), spec.model.revision
    own, tokenizer = read_own_decoding(*origin), load_local_tokenizer(*origin)
    return TrainingSetup(
        request=request,
        name=f"{spec.name}-{request.label}",
        # A path with a new line would end a comment, and its directories may name a person.
        note=" ".join(request.note.replace(place, shown).split()),
        policy=policy,
        is_chat=read_chat_template(*origin) != "",
        context_length=read_position_limit(*origin),
        own_decoding=own,
        end_tokens=list_end_tokens(tokenizer, own.get("eos_token_id")) if own and tokenizer else (),
        rewards=tuple(
            ExportedReward(name, weights[name] / largest, *info.rewards[name], shaping[name])
            for name in names
        ),
    )


def _describe_shaping(
    reward: str, info: TaskInfo, params: Params, spec: SweepSpec
) -> tuple[str, ...]:
    sentences: list[str] = []
    if reward == info.partial_reward and params.get(PARTIAL_CREDIT):
        sentences.append("partial credit: the share of tests that pass")
    if reward == info.length_reward:
        sentences.append(describe_length(params, spec.training))
    condition = str(params.get(f"conditioning.{reward}", NO_CONDITION))
    if condition != NO_CONDITION:
        low, high = info.rewards[condition]
        share = float(params[f"conditioning_threshold.{reward}"])
        sentences.append(f"0 unless {condition} is at least {(1 - share) * low + share * high:g}")
    return tuple(sentences)


def describe_length(params: Mapping[str, object], training: TrainingSettings) -> str:
    """Return the shape of the length reward, in tokens with the end token."""
    limit, longest = training.length_limit, training.max_completion_length
    match params.get("length_shape", "step"):
        case "ramp":
            return f"1 up to {limit} tokens, then in a line to 0 at {longest}"
        case "overlong":
            cache = float(str(params["length_cache"])) * longest
            return f"1 up to {longest - cache:g} tokens, then in a line to 0 at {longest}"
        case _:
            return f"1 up to {limit} tokens, else 0"
