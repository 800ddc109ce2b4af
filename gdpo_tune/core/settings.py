"""Settings that all trials of a sweep share, one class for each section of the YAML."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from gdpo_tune.core.files import is_local_source

Sharding = Literal["auto", "full", "none"]
"""Division of a policy among the workers of a trial."""
EVERY_LINEAR = "all-linear"
"""In `model.lora_targets`: every linear module but the output head."""
INDIFFERENT = "indifferent"
"""Mark of a setting that does not change the result of a training: it may change while a sweep is
interrupted, such as after memory ran out, and is no part of an identity."""


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, and `"60"` is not 60."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    other_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the file that are read elsewhere."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, which are not checked."""
        return self.model_copy(update=changes)

    def __hash__(self) -> int:  # pydantic's own one refuses values that are mappings
        return hash(self.model_dump_json())

    def list_decisive(self) -> dict[str, Any]:
        """Return the settings that decide a result."""
        values, fields = self.model_dump(), type(self).model_fields
        return {n: values[n] for n, field in fields.items() if INDIFFERENT not in field.metadata}


def build_refusal(reason: str, fix: str) -> PydanticCustomError:
    """Return the error that a validator raises, with its reason and fix for the message."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "fix": fix})


def read_micro_batch(value: object) -> object:
    """Return a number of completions, or `auto`."""
    if value == "auto" or (type(value) is int and value >= 0):
        return value
    fix = "write micro_batch_size: auto, or a number such as 8"
    raise build_refusal("neither auto nor a whole number of at least 0", fix)


class TrainingSettings(Section):
    """Training of every trial (the YAML's `training:`).

    The budget is counted in completions: `steps * completions_per_step`, whatever the group size.
    """

    steps: Annotated[int, Ge(1), Le(10**9)] = 60
    """Steps of a trial: one batch of samples and `num_iterations` passes over it."""
    completions_per_step: Annotated[int, Ge(2), Le(1 << 20)] = 64
    """Completions sampled a step; prompts a step = completions_per_step / group_size."""
    micro_batch_size: Annotated[
        Annotated[int, Ge(0)] | Literal["auto"], BeforeValidator(read_micro_batch), INDIFFERENT
    ] = "auto"
    """Completions of a worker whose forward and backward pass are computed at once: fewer take less
    memory and train the same. `auto`: as many tokens as fit into memory; 0: all. Where memory runs
    out, they are halved. In TRL, per_device_train_batch_size; in verl,
    ppo_micro_batch_size_per_gpu."""
    mini_batch_size: Annotated[int, Ge(0)] = 0
    """Completions, over all workers, of one optimizer step; 0 takes all of a step. Fewer give
    several optimizer steps on the samples of a step, and ratios that the clip can reach. In TRL,
    steps_per_generation / gradient_accumulation_steps; in verl, ppo_mini_batch_size, in prompts."""
    max_completion_length: Annotated[int, Ge(1), Le(1 << 24)] = 64
    """Tokens after which a completion is cut."""
    length_limit: Annotated[int, Ge(1)] = 26
    """Tokens within which a completion earns the length reward."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate over the steps."""
    warmup_share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the steps, rounded up, over which the learning rate rises from 0."""
    max_grad_norm: Annotated[float, Ge(1e-30), Le(1e30)] = 1.0
    """Gradient norm above which gradients are scaled down."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps AdamW's two moments in 8 bits instead of 32. It saves 6 bytes of GPU
    memory per trainable parameter (`pip install 'gdpo-tune[adam8bit]'`)."""
    train_prompts: Annotated[int, Ge(1)] = 2048
    """Distinct training prompts that a trial draws from."""
    validation_prompts: Annotated[int, Ge(2)] = 128
    """Prompts that the search sees; one alone would have no standard error."""
    test_prompts: Annotated[int, Ge(2)] = 256
    """Prompts on which the front is measured; evaluated once, at the end of a trial."""
    samples_per_prompt: Annotated[int, Ge(1), Le(1 << 20)] = 2
    """Completions sampled for each held-out prompt."""
    evaluation_temperature: Annotated[float, Ge(0), Le(1e3)] = 1.0
    """Temperature of held-out completions, whatever that of the training; 0 takes the most likely
    token. Objectives compare policies at this temperature."""
    evaluate_every: Annotated[int, Ge(1)] = 30
    """Steps between two evaluations on validation prompts (the last step always has one)."""
    checkpoint_every: Annotated[int, Ge(1)] = 20
    """Steps between two checkpoints, from which an interrupted trial continues."""
    dead_steps: Annotated[int, Ge(0)] = 10
    """Consecutive steps with every advantage 0 that end a trial as `no signal`; capped at `steps`;
    0 never ends it."""

    @property
    def validation_completions(self) -> int:
        """Completions of an evaluation on validation prompts."""
        return self.validation_prompts * self.samples_per_prompt

    @property
    def test_completions(self) -> int:
        """Completions of an evaluation on test prompts."""
        return self.test_prompts * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of a pass over the completions of a step."""
        return self.completions_per_step // (self.mini_batch_size or self.completions_per_step)

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises: `warmup_share` of all, rounded up.

        Source: `TrainingArguments.get_warmup_steps` of transformers, which takes the ceiling.
        """
        # .07 x 100 is 7.000000000000001 in binary fractions, and means 7.
        return math.ceil(round(self.warmup_share * self.steps, 6))


class SandboxSettings(Section):
    """Where the policy's code runs, and its limits (the YAML's `sandbox:`)."""

    type: Annotated[Literal["local", "unsafe_no_isolation"], INDIFFERENT] = "local"
    """`local` locks processes of this machine (Linux); `unsafe_no_isolation` runs the code of a
    model with all the rights of the trainer."""
    workers: Annotated[int, Ge(1), Le(1024), INDIFFERENT] = 1
    """Candidates that run side by side in a trial, if memory allows."""
    modules: Annotated[tuple[str, ...], AfterValidator(lambda names: tuple(sorted({*names})))] = ()
    """Installed packages that code may import besides the standard library, such as `numpy`."""
    cpu_seconds: Annotated[float, Ge(0.01), Le(86_400)] = 1.0
    """CPU time of one candidate, all its tests together."""
    wall_seconds: Annotated[float, Ge(0.01), Le(86_400)] = 4.0
    """Wall time of one candidate: a backstop for code that sleeps."""
    memory_mb: Annotated[int, Ge(64), Le(1 << 20)] = 512
    """Address space of one candidate in MiB."""


class HeldOutData(Section):
    """Split of a data set that is held out as it is; without a key, prompts are cut by a hash."""

    split: str = ""
    """Its name; default: that of the key, `validation` or `test`."""
    source: str = ""
    """Another source of the same layout; default: `data.source`."""


class DataSettings(Section):
    """Where prompts come from (the YAML's `data:`); without a source the task writes its own."""

    source: str = ""
    """Id of a dataset on the Hub, or a path: a `.json`, `.jsonl` (also `.gz`), `.csv` or `.parquet`
    file, a directory of such files, a clone from the Hub, or what `save_to_disk` wrote."""
    layout: str = ""
    """One of the layouts below: the columns and their meaning."""
    columns: dict[str, str] = {}
    """Column of the layout -> column of the data that stands for it, where the names differ:
    `{problem: question, answer: final_answer}`."""
    prompt_template: str = ""
    """Prompt composed of columns of the data, such as `"{Body} {Question}"`; `{{` is a brace."""
    config: str = ""
    """Configuration of a dataset on the Hub or of its clone, such as `main`."""
    split: str = "train"
    """Split of a dataset on the Hub, or of a directory by the names of its files, that prompts are
    taken from. Our splits are cut out of it, but for those that the next two keys name."""
    validation: HeldOutData = HeldOutData()
    """Prompts of the search: `{split: validation}`, or `{source: valid.jsonl}`."""
    test: HeldOutData = HeldOutData()
    """Prompts of the front. Held-out prompts are left out of the training prompts."""
    max_prompt_length: Annotated[int, Ge(1), Le(1 << 24)] = 1024
    """Tokens above which a prompt is left out; the report says how many were."""

    @property
    def is_local(self) -> bool:
        """True if the source is a path: it exists, or cannot be an id on the Hub."""
        return is_local_source(self.source)

    def __hash__(self) -> int:  # said again, because type checkers take it from the class itself
        return super().__hash__()


class ModelSettings(Section):
    """How a policy is loaded and trained (the YAML's `model:`)."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the computation; `auto` is bfloat16 on a GPU that computes in it, and for
    policies above 50 million parameters on a CPU that does; float32 elsewhere. Weights that are
    trained stay in float32, in which a small learning rate is not rounded away; under LoRA the
    others are kept in `dtype` too."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations to save memory; `auto` is on for a GPU."""
    shared_prompts: Annotated[Literal["auto", "on", "off"], INDIFFERENT] = "auto"
    """Compute each prompt once for all of its completions: the same numbers up to rounding, in a
    fraction of the time and memory. `auto` does so where the policy's architecture allows it and
    the first batch of a trial agrees; `on` refuses a policy that does not allow it."""
    attention: Annotated[Literal["auto", "sdpa", "eager", "flash_attention_2"], INDIFFERENT] = (
        "auto"
    )
    """How Transformers computes attention where prompts are not shared; `auto` is its own choice.
    In Transformers, attn_implementation."""
    dropout: bool = False
    """Train with the dropout that the policy's own configuration asks for. `false` turns it off:
    with it, log-probabilities are random, so a policy differs from itself."""
    lora_rank: Annotated[int, Ge(0), Le(1 << 16)] = 0
    """Rank of the LoRA adapters that are trained; 0 trains every weight."""
    lora_alpha: Annotated[float, Ge(0)] = 0.0
    """Scale of the adapters; 0 stands for twice the rank."""
    lora_targets: tuple[str, ...] = (EVERY_LINEAR,)
    """Names of the modules that get an adapter."""
    revision: str = ""
    """Branch, tag or commit of a policy on the Hub."""
    instructions: Literal["auto", "on", "off"] = "auto"
    """Give the policy the task's instructions on the rewarded format. `auto` gives them to all but
    the policies that ship, and to a policy that was trained here as in its training."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the policy's chat template, such as `{enable_thinking: false}`. A directory of a
    trained policy has them as defaults. In TRL, chat_template_kwargs; in verl,
    apply_chat_template_kwargs."""
    template_date: Annotated[str, INDIFFERENT] = ""
    """Date that the chat template writes as today's, `2026-01-31`; default: the day on which the
    sweep or training started, for all of its trials."""


class StartSettings(Section):
    """Supervised training before all trials, which begin at its policy (the YAML's `start:`).

    It is itself a trial and a baseline. Without the section, trials begin at the policy as it is.
    """

    demonstrations: Annotated[str, MinLen(1)] = "data"
    """`data` writes them from the solutions that the data or the task states, of training prompts
    alone. A file, `.jsonl` or as `data.source` may be, has them as columns `prompt` (a text, or
    messages) and `completion` (the text that the policy is to write)."""
    steps: Annotated[int, Ge(1), Le(10**9)] = 60
    """Optimizer steps."""
    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-4
    """Highest learning rate: it rises over the first tenth of the steps, then falls to 0."""
    completions_per_step: Annotated[int, Ge(1), Le(1 << 20)] = 16
    """Demonstrations of a step, of all workers together; `training.micro_batch_size` of them, or
    the next smaller number that divides them, are computed at once."""

    @property
    def file(self) -> str:
        """Path of the demonstrations; empty if they are written from the data."""
        return "" if self.demonstrations == "data" else self.demonstrations


class RolloutSettings(Section):
    """Engine that samples completions during training (the YAML's `rollout:`)."""

    engine: Annotated[Literal["auto", "transformers", "vllm"], INDIFFERENT] = "auto"
    """`auto` is vllm on a GPU where it is installed, else the fast CPU sampler where
    it supports the policy (small, Llama-like), else transformers."""
    vllm_mode: Annotated[Literal["colocate", "server"], INDIFFERENT] = "colocate"
    """In the trainer's process, or a server that is already running."""
    vllm_server: Annotated[str, INDIFFERENT] = ""
    """Address of that server, `http://HOST:PORT`."""
    vllm_memory_share: Annotated[float, Gt(0), Lt(1), INDIFFERENT] = 0.45
    """Part of the trial's share of a GPU that vLLM takes."""
    reuse_engine: Annotated[bool, INDIFFERENT] = True
    """Keep a colocated vLLM for the next trial of its process, which then starts in the time of a
    sync of weights; `false` gives every trial a new process. Results are the same."""
    sleep: Annotated[bool, INDIFFERENT] = False
    """Let a colocated vLLM give its memory back while a step is computed, so that a larger policy
    fits; needs a whole GPU. Each step moves the engine's weights to the machine's memory and back.
    In TRL, vllm_enable_sleep_mode."""
    importance_sampling: Literal[
        "sequence_mask", "sequence_truncate", "token_mask", "token_truncate", "off"
    ] = "token_truncate"
    """Correction of what vLLM rounds differently than the trainer, by the ratio of the two
    probabilities: of a completion or of each token. `mask` leaves out a ratio above the cap,
    `truncate` lowers it to the cap. The ratio of a completion is a product over its tokens, and so
    favours short ones. In TRL, vllm_importance_sampling_mode."""
    importance_sampling_cap: Annotated[float, Ge(1), Le(1e30)] = 3.0
    """Largest ratio of that correction. In TRL, vllm_importance_sampling_clip_max."""
