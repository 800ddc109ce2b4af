"""GDPOTrainer: TRL's GRPOTrainer with our advantages, metrics of each reward, and a guard on NaN.

TRL computes advantages inside a long method, so private hooks are overridden: they keep the rewards
and replace TRL's advantages with those of `compute_advantages`. Others tokenize prompts, restore
random states, and let scoring begin early.

The base classes, `ResumableTrainer` and `MicroBatchTrainer`, are GRPOTrainer on shared policies,
with a faster step and, up to rounding, the same result. To understand GDPO, read them as
`GRPOTrainer`.

`StartTrainer` learns from demonstrations before all trials.

Shapes: N completions over all processes, n of this process, G group size, K rewards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from transformers import Trainer
from trl.trainer.sft_trainer import SFTTrainer

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.trial_files import DIFFERENCE, NO_ADVANTAGE, REWARDS, ZERO_STD
from gdpo_tune.tasks.base import RewardFunction
from gdpo_tune.training.checkpoints import OPTIMIZER_FILE, SCHEDULER_FILE
from gdpo_tune.training.distributed import gather_weights, is_sharded
from gdpo_tune.training.evaluation import BeginScoring, require_finite
from gdpo_tune.training.micro_batches import KEPT_PASS, MicroBatchTrainer, mask_loss
from gdpo_tune.training.normalization import add_terms, compute_advantages, find_informative_groups
from gdpo_tune.training.progress import TRAINING
from gdpo_tune.training.prompt_selection import PromptSelection
from gdpo_tune.training.rollout import sample_turn
from gdpo_tune.training.self_check import StepJudge
from gdpo_tune.training.training_state import (
    check_process_count,
    compute_eagerly,
    is_8bit,
    load_sharded_optimizer,
)
from gdpo_tune.training.turns import encode_answers


class ResumableTrainer(Trainer):
    """Trainer whose checkpoints are whole, also of a divided policy, and that refuses NaN."""

    model: Any
    """The policy in training; the wrapper of several processes is `model_wrapped`."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step of the training."""
        return 1

    def create_accelerator_and_postprocess(self) -> None:
        """Turn FSDP2 on where accelerate does not: among processes on CPUs."""
        super().create_accelerator_and_postprocess()
        plugin: Any = self.args.fsdp_plugin_args
        if plugin is None or self.is_fsdp_enabled:
            return
        state: Any = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
        # Accelerate copies it from one state to the other.
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """Create the optimizer, on a CPU one that compiles nothing."""
        optimizer = super().create_optimizer(*arguments, **keywords)
        if self.args.use_cpu and is_8bit(optimizer):
            compute_eagerly(optimizer)
        return optimizer

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Load the weights of a checkpoint before they are divided."""
        if self.is_fsdp_enabled and resume_from_checkpoint is not None:
            self.is_fsdp_enabled = False  # Transformers would expect divided files
            try:
                super()._load_from_checkpoint(resume_from_checkpoint)
            finally:
                self.is_fsdp_enabled = True
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if self.is_fsdp_enabled:
            # Now: in the reference policy's forward pass peft has turned gradients off. FSDP would
            # then take all weights for frozen and reduce gradients in bfloat16.
            prepared[0]._get_fsdp_state()._lazy_init()
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        network: Any = self.model
        if not is_sharded(network):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what Transformers does not: a whole state for a divided policy."""
        if checkpoint is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        directory = Path(checkpoint)
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        moments = torch.load(directory / OPTIMIZER_FILE, mmap=True, **options)
        load_sharded_optimizer(self.optimizer, moments)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(directory / SCHEDULER_FILE, **options))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            check_process_count(Path(checkpoint))
        super()._load_rng_state(checkpoint)

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute the loss and refuse NaN and inf."""
        loss: Any = super().compute_loss(*arguments, **keywords)
        return self._require_finite_loss(loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does and refuse a gradient norm of NaN or inf."""
        norm = logs.get("grad_norm", 0.0)
        if not math.isfinite(norm):
            raise NonFiniteError(f"gradient norm is {norm} at {self._describe_step(done=1)}")
        super().log(logs, start_time)

    def _require_finite_loss(self, loss: Tensor) -> Tensor:
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(f"loss is {loss.item()} at {self._describe_step()}")
        return loss

    def _describe_step(self, done: int = 0) -> str:
        return f"step {(self.state.global_step - done) // self.updates_per_step + 1}"


class GDPOTrainer(ResumableTrainer, MicroBatchTrainer):
    """GRPOTrainer whose advantages follow `normalization`, any key of `registry.NORMALIZATIONS`.

    `reward_weights` of TRL's arguments keep their meaning; `scale_rewards` and
    `multi_objective_aggregation` have no effect. Each step also logs `compute_reward_metrics`.

    Raises:
        NonFiniteError: NaN or inf in the loss, in the gradient norm, or from a reward function.
            None from a reward function is allowed: it means "not scored".
    """

    def __init__(
        self,
        *,
        normalization: str,
        reward_funcs: Sequence[RewardFunction],
        gamma: float = 0.0,
        baseline: str = "group_mean",
        ranges: Sequence[tuple[float, float]] | None = None,
        encode: Callable[[Sequence[str]], list[list[int]]] | None = None,
        begin_scoring: BeginScoring | None = None,
        check_batch: Callable[[Any, dict[str, Any]], None] | None = None,
        selection: PromptSelection | None = None,
        **arguments: Any,
    ) -> None:
        """Build the trainer from K reward functions and TRL's `arguments`.

        `normalization` (the mode), `gamma`, `baseline` and `ranges` are as in `compute_advantages`.
        `encode` maps prompts to the tokens that the policy reads; None: the tokenizer does.
        `begin_scoring` gets each completion before the rewards of its batch are computed.
        `check_batch` gets this trainer and its first batch, once that is sampled and scored.
        `selection` replaces the prompts of the training set; None: they are taken in its order.
        """
        self._compute_advantages = functools.partial(
            compute_advantages, mode=normalization, gamma=gamma, baseline=baseline, ranges=ranges
        )
        self._encode = encode
        self._begin_scoring = begin_scoring
        self._check_batch = check_batch
        self.selection = selection
        self._judge = StepJudge()
        self._unjudged: list[tuple[Tensor, Tensor]] = []
        """Log-probabilities of engine and trainer of the micro-batches of this step."""
        self._latest: Tensor | None = None
        """The trainer's log-probabilities of the latest micro-batch."""
        self._sampled_problems: list[int] = []
        self._rewards: Tensor | None = None
        self._had_signal = False
        self.logged_metrics: set[str] = set()
        """Names of metrics that reward functions logged."""
        guarded: Any = [self._guard(function) for function in reward_funcs]
        super().__init__(reward_funcs=guarded, **arguments)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of a step: passes times mini-batches."""
        arguments: Any = self.args
        return self.num_iterations * arguments.steps_per_generation

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace the advantages [n] of TRL by ours, computed from all N completions."""
        # The rows of a process are adjacent, in the order of the processes.
        first = self.accelerator.process_index * len(inputs)
        chosen: list[int] = []
        if self.selection is not None:
            size: Any = self.num_generations
            chosen = self.selection.select(self.state.global_step // self.updates_per_step)
            own = [chosen[row // size] for row in range(first, first + len(inputs))]
            inputs = [{"prompt": self.selection.prompts[i], "problem": i} for i in own]
        if self._begin_scoring is not None:
            self._sampled_problems = [one["problem"] for one in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._sampled_problems = []  # what a self-check samples is not scored
        sampled, trained = (output.get(f"{kind}_per_token_logps") for kind in ("sampling", "old"))
        if sampled is not None and trained is not None:
            present, weights = mask_loss(output).bool(), output["importance_sampling_ratio"]
            weights = weights[present] if weights.shape == present.shape else weights
            self._judge.judge(self, sampled[present], trained[present], weights)
        if self._check_batch is not None:
            # It moves the weights for a moment, and needs the memory.
            output = {name: value for name, value in output.items() if name not in KEPT_PASS}
            self._check_batch(self, output)
            self._check_batch = None
        rewards = self._rewards
        assert rewards is not None, "TRL no longer calls _calculate_rewards"
        self._rewards = None
        network: Any = self.model
        mode = "train" if network.training else "eval"
        group_size: Any = self.num_generations if mode == "train" else self.num_generations_eval
        weights = self.reward_weights.to(rewards.device)
        advantages = self._compute_advantages(rewards, weights, group_size)
        self._had_signal |= bool((advantages != 0).any())
        if self.selection is not None:
            self.selection.learn(chosen, find_informative_groups(advantages, group_size).tolist())
        output["advantages"] = advantages[first : first + len(inputs)]
        logged: Any = self._logs["advantages"]
        logged.extend(advantages.tolist())
        logged_metrics: Any = self._metrics[mode]
        for name in self.reward_func_names:  # TRL's are in float32, and NaN where nothing is scored
            for kind in ("mean", "std"):
                logged_metrics.pop(f"{REWARDS}{name}/{kind}", None)
        metrics = compute_reward_metrics(rewards, weights, group_size, self.reward_func_names)
        metrics[NO_ADVANTAGE] = float((advantages == 0).double().mean())
        logged_metrics.pop(ZERO_STD, None)
        logged_metrics.update((name, [value]) for name, value in metrics.items())
        return output

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.selection is not None:
            self.selection.load(Path(checkpoint))

    @property
    def judges_early(self) -> bool:
        """True if `note_sampled` has an effect."""
        return self._begin_scoring is not None

    def note_sampled(self, row: int, completion: str) -> None:
        """Let the scoring of a completion of this batch begin; any thread may call this."""
        if self._begin_scoring is not None and self._sampled_problems:
            self._begin_scoring(self._sampled_problems[row], completion)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Sample, and let completions be judged while log-probabilities are computed."""
        sampled: tuple[Any, ...] = super()._generate(prompts)
        if sampled[2] is not None:  # 0 for each token of a tool
            sampled[5]["lengths"] = list(map(sum, sampled[2]))
        for row, text in enumerate(sampled[3]):
            self.note_sampled(row, text)
        return sampled

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **keywords)
        self._rewards = rewards  # [N, K], of all processes
        return rewards

    def _log_metric(self, name: str, value: float) -> None:
        self.logged_metrics.add(name)
        super()._log_metric(name, value)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._encode is None:
            return super()._tokenize_prompts(prompts)
        return self._encode(prompts), None, {}  # no images, no further fields

    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute a mini-batch, and judge its engine where TRL does not compare it.

        TRL compares it with the trainer only to correct what was sampled.
        """
        loss: Tensor = super().training_step(*arguments, **keywords)
        if self._unjudged:
            sides = map(torch.cat, zip(*self._unjudged, strict=True))
            self._unjudged = []
            self._metrics["train"][DIFFERENCE].append(self._judge.judge(self, *sides))
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        computed: Any = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        self._latest = computed[0].detach()
        TRAINING.note_progress()
        return computed

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any
    ) -> Tensor:
        """Compute TRL's loss; before the first advantage it is exactly 0, without a pass."""
        terms = self.beta != 0 or self._entropy_bonus_enabled or self.aux_loss_enabled
        if self._had_signal or terms or self.accelerator.num_processes > 1:
            loss = super().compute_loss(model, inputs, *arguments, **keywords)
            sampled = inputs.get("sampling_per_token_logps")
            if sampled is not None and "old_per_token_logps" not in inputs:
                assert self._latest is not None, "TRL no longer computes them by this hook"
                present = mask_loss(inputs).bool()
                self._unjudged.append((sampled[present], self._latest[present]))
            return loss
        trained = (p for p in self.model.parameters() if p.requires_grad)
        zero = torch.stack([0 * p.sum() for p in trained]).sum()  # gradients of 0, not none
        return self._require_finite_loss(zero)

    _get_tool_suffix_ids: Any = encode_answers

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Sample with Transformers while each process has all weights, at a pace of its own."""
        if self.rollout_func is not None:  # a turn after its own, with answers of tools
            settings = getattr(self.rollout_func, "keywords", {})
            return sample_turn(arguments[0], self, **settings), None
        model: Any = self.model
        with nullcontext() if self.use_vllm else gather_weights(model):
            return super()._generate_single_turn(*arguments, **keywords)

    def _guard(self, function: RewardFunction) -> RewardFunction:
        """Wrap a reward function to refuse NaN, which TRL would take for "not scored"."""

        @functools.wraps(function)
        def guarded(*arguments: Any, **keywords: Any) -> Sequence[float | None]:
            values = function(*arguments, **keywords)
            name = getattr(function, "__name__", type(function).__name__)
            require_finite(values, f"reward {name}", f"at {self._describe_step()}")
            return values

        return guarded


class StartTrainer(ResumableTrainer, SFTTrainer):
    """TRL's SFTTrainer on rows of tokens, as a `StepReporter` sees a trainer."""

    logged_metrics = ("mean_token_accuracy",)
    selection = None
    demonstrations = ""
    """How many it has, for a person."""


def compute_reward_metrics(
    rewards: Tensor, weights: Tensor, group_size: int, names: Sequence[str]
) -> dict[str, float]:
    """Compute the metrics of each of K rewards [N, K] in one generation batch; NaN = not scored.

    Returns:
        `rewards/<name>/mean` and `.../std` over the scored completions, as TRL names them;
        `.../frac_reward_zero_std`, the share of the groups with a scored reward whose scored
        rewards are all equal; `.../share` of |w_k sigma_k| in its sum over all rewards, sigma_k the
        pooled standard deviation within groups. `frac_reward_zero_std` is that share for the
        weighted sum of the rewards, and `reward_std` is 0 where this sum is the same in the whole
        batch. An undefined metric, such as the mean of a reward that scored nothing, is left out.

    Values are compared before they are averaged, as in `normalization`: the mean of three rewards
    of 0.1 is not 0.1 in floating point, and TRL's sums of float32 differ by their rounding.
    """
    values = rewards.double()
    grouped = values.unflatten(0, (-1, group_size))
    present = ~grouped.isnan()
    seen = present.any(dim=1)
    lowest = torch.where(present, grouped, torch.inf).amin(dim=1, keepdim=True)
    varies = lowest < torch.where(present, grouped, -torch.inf).amax(dim=1, keepdim=True)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    centred = torch.where(present & varies, centred, 0.0)
    dead = seen & ~varies.squeeze(1)
    freedom = (present.sum(dim=(0, 1)) - seen.sum(dim=0)).clamp(min=1)
    pull = weights.double().abs() * (centred.square().sum(dim=(0, 1)) / freedom).sqrt()
    total = pull.sum().clamp(min=torch.finfo(torch.float64).tiny)
    metrics: dict[str, float] = {}
    sums = (values * weights.double()).nansum(dim=1)[~values.isnan().all(dim=1)]
    if len(sums):
        equal = (add_terms(centred * weights.double()) == 0).all(dim=1)[seen.any(dim=1)]
        metrics[ZERO_STD] = float(equal.sum() / len(equal))
        if sums.min() == sums.max():
            metrics["reward_std"] = 0.0
    for k, name in enumerate(names):
        scored = values[:, k][~values[:, k].isnan()]
        metrics[f"{REWARDS}{name}/share"] = float(pull[k] / total)
        if len(scored):
            metrics[f"{REWARDS}{name}/mean"] = float(scored.mean())
            metrics[f"{REWARDS}{name}/{ZERO_STD}"] = float(dead[:, k].sum() / seen[:, k].sum())
        if len(scored) > 1:
            metrics[f"{REWARDS}{name}/std"] = float(scored.std())
    return metrics
