"""The result of an exporter, and what every exporter checks and reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from gdpo_tune.core.errors import ExportError, SpecProblem
from gdpo_tune.core.settings import RolloutSettings
from gdpo_tune.exporters.glue.prompt_rows import ExportedPrompt
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.spec.notation import dump_flow
from gdpo_tune.spec.problems import join_names, show

Settings = Mapping[str, object]
REWARDS_FILE = "rewards.py"
"""Name in an exported folder of the module with the reward functions."""
PROMPTS_FILE = "prompts.parquet"
"""Name in an exported folder of the training prompts."""
POLICY_COPY = "policy"
"""Directory in an exported folder with a policy that ships with this package."""
START = "bash run.sh"
"""Command that starts the library in an exported folder."""
PRECISION = {"auto": "bfloat16 on a GPU, float32 elsewhere", "float32": "float32"}
"""`model.dtype` -> precision of the training, if a library may compute in another one."""
NOT_SCORED = "counts as a raw 0, which is biased: the library has no value for it"
OWN_TOKENS = "tokens of the optimizer step itself: the gradient differs by 7 % (measured)"
OWN = "the trainer's own model sampled"
UNBIASED = (
    "k3 times the ratio of probabilities, whose gradient is that of the reverse KL "
    "(`use_bias_correction_kl`)"
)
"""Gradient of the KL in training."""


@dataclass(frozen=True)
class Difference:
    """Something that the library does differently than the training that was measured."""

    topic: str
    ours: str
    theirs: str


MEASURED = Difference(
    "sizes that are measured",
    "of one batch: docs/export.md, Measured differences",
    "its own code on the same batch",
)


@dataclass(frozen=True)
class TrainingFiles:
    """Files of a training besides the configuration: how its library gets rewards and prompts."""

    glue: Mapping[str, Sequence[str]]
    """Module of `exporters.glue` -> its definitions that the library looks for in `rewards.py`, or
    that `ending` needs."""
    ending: str
    """Source at the end of `rewards.py`."""
    build_row: Callable[[ExportedPrompt, int], Mapping[str, object]]
    """Columns of a prompt, which has that number, in `prompts.parquet`; a function of `glue`."""
    strips_opened_tag: bool = False
    """True if prompts are read as in a trial: without a tag that the chat template opens last."""
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of another file -> its text."""


@dataclass(frozen=True)
class Exported:
    """A training, or a merge, as the files of a library."""

    library: str
    """With the version whose source the exporter was written from."""
    file: str
    """Name of its configuration."""
    text: str
    install: str
    """Command that installs the library."""
    run: str
    """Lines of a shell that start it in the folder, with the arguments "$@"."""
    differences: Sequence[Difference]
    to_supply: Mapping[str, str]
    """Key -> what the user has to put there."""
    training: TrainingFiles | None = None
    """None for a merge, which trains nothing."""


def check_support(
    recipe: Recipe,
    library: str,
    *,
    modes: Collection[str],
    losses: Collection[str],
    schedules: Collection[str] = ("constant", "linear", "cosine"),
    leave_one_out: Collection[str] = (),
    revisions: bool = True,
    notes: Mapping[str, str] | None = None,
    others: Sequence[SpecProblem] = (),
) -> None:
    """Refuse a recipe that the library would change or ignore in part.

    `modes`, `losses` and `schedules` are those that the library has; `leave_one_out` are the modes
    under which it has that baseline. `revisions` tells whether it can load another revision of a
    model than the newest. `notes` map a mode to why the library lacks it although it seems to have
    it; `others` are problems that only this library has.

    Raises:
        ExportError: with every reason.
    """
    problems: list[SpecProblem] = []

    def add(key: str, value: object, reason: str, fix: str) -> None:
        problems.append(SpecProblem(recipe.note, key, show(value), reason, fix))

    if recipe.mode not in modes:
        note = (notes or {}).get(recipe.mode, "has no such normalization")
        reason = f"{library} {note}; it knows {join_names(modes)}"
        add("normalization", recipe.mode, reason, "pick a trial with one of those")
    elif recipe.leaves_one_out and recipe.mode not in leave_one_out:
        reason = f"{library} compares with the mean of the whole group under {recipe.mode}"
        add("baseline", "leave_one_out", reason, "pick a trial with baseline: group_mean")
    if recipe.loss not in losses:
        reason = f"{library} cannot average the loss in this way; it knows {join_names(losses)}"
        add("loss_type", recipe.loss, reason, "pick a trial with one of those")
    shape = recipe.training.lr_schedule
    if shape not in schedules:
        reason = f"{library} has no such schedule; it knows {join_names(schedules)}"
        add("training.lr_schedule", shape, reason, "--set training.lr_schedule=constant")
    if recipe.gamma > 0:
        reason = "no library makes the weights depend on how saturated a reward is"
        add("gamma", recipe.gamma, reason, "pick a trial with gamma: 0")
    if recipe.model.revision and not revisions:
        reason = f"{library} loads the newest revision"
        fix = "download that revision, and set its directory with --set policy="
        add("model.revision", recipe.model.revision, reason, fix)
    if recipe.schedule:
        reason = (
            "no library changes weights or the learning rate during training, as this member of a "
            "population did"
        )
        fix = "train it here: gdpo_tune.train --from"
        add("schedule", f"{len(recipe.schedule)} changes", reason, fix)
    if recipe.sandbox.type == "unsafe_no_isolation":
        reason = "the folder would run code of the policy without isolation, wherever it is started"
        add("sandbox.type", recipe.sandbox.type, reason, "--set sandbox.type=local")
    if problems or others:
        raise ExportError(library, (*problems, *others))


def list_common_differences(
    recipe: Recipe,
    *,
    eps: str,
    whitening: str,
    missing: str,
    precision: str = "",
    correction: str = "",
    bnpo: str = "",
    kl_gradient: str = "",
    clamps_kl: bool = False,
    step_tokens: str = "",
    unanimous: str = "",
) -> list[Difference]:
    """Return the differences that several libraries have; an empty text means that it has none.

    The library adds `eps` to a standard deviation that divides; `whitening` is how it normalizes
    over the batch, under GDPO; `missing` is how it treats a reward that was not scored; `precision`
    is what it computes in, if the file cannot say so; `correction` is how it weights what vLLM
    samples; `bnpo` is what it averages the loss of BNPO over, if a mini-batch is divided;
    `kl_gradient` is the gradient of its KL, where it lacks TRL's `use_bias_correction_kl`;
    `clamps_kl` tells whether it clamps that KL; `step_tokens` are those that divide the loss of an
    optimizer step on a part of the samples; `unanimous` is the largest advantage, under GDPO, in
    groups whose rewards are all equal.

    Sizes in the texts are those of the batch that `docs/export.md` describes; tests measure them.
    """
    rows = [MEASURED]
    if recipe.model.dtype == "auto" or (precision and recipe.model.dtype == "float32"):
        ours, theirs = PRECISION[recipe.model.dtype], precision or "bfloat16"
        rows.append(Difference("computed in", ours, theirs))
    if correction and recipe.rollout.importance_sampling != "off":
        topic = "probabilities that the sampler rounds differently"
        rows.append(Difference(topic, describe_correction(recipe.rollout), correction))
    if eps:
        rows.append(Difference("added to standard deviations", "1e-4", eps))
    if whitening and not recipe.sums_first:
        ours = "mean 0 and standard deviation 1 over the completions of a step, eps 1e-4"
        rows.append(Difference("normalization over the batch", ours, whitening))
    ours = "statistics in float64; a group with equal rewards gets exactly 0"
    theirs = (
        "statistics in float32: rounding is divided by a small number, and such a group can get an "
        "advantage that is not 0"
    )
    if recipe.mode == "gdpo":
        theirs += f" (measured in groups of 6: up to {unanimous})"
    rows.append(Difference("groups whose rewards are all equal", ours, theirs))
    if missing:
        ours = "counts as its group's mean: it neither helps nor hurts"
        rows.append(Difference("a reward that is not scored (`None`)", ours, missing))
    if step_tokens and recipe.mini_batches > 1 and recipe.loss in ("dapo", "cispo"):
        topic = f"loss_type {recipe.loss} divides by"
        ours = "tokens of the step, divided by its optimizer steps"
        rows.append(Difference(topic, ours, step_tokens))
    if bnpo and recipe.loss == "bnpo" and recipe.micro_batches > 1:
        ours = "tokens of the whole optimizer step"
        rows.append(Difference("loss_type bnpo averages over", ours, bnpo))
    if kl_gradient and recipe.get_number("beta") > 0:
        rows.append(Difference("gradient of the KL", UNBIASED, kl_gradient))
    if clamps_kl and recipe.get_number("beta") > 0:
        theirs = "the same estimator (k3), its logarithm and value clamped at 20 and 10"
        rows.append(Difference("KL to the untrained policy", "k3, not clamped", theirs))
    return rows


def list_order_differences(recipe: Recipe) -> list[Difference]:
    """Return the order of prompts that are read several times, by a library that never shuffles."""
    if recipe.training.steps * recipe.prompts <= recipe.training.train_prompts:
        return []
    ours = "as in the file in the first pass, then another order in each pass"
    return [Difference("order of the prompts", ours, "as in the file in every pass")]


def describe_devices(recipe: Recipe, key: str, example: str) -> Difference:
    """Return the GPUs, whose number is a key; `example` is an argument that changes it."""
    ours = f"{recipe.training.completions_per_step} on one device"
    theirs = (
        f"the same on one GPU, `{key}`; with more, `{START} {example}`, which have to divide the "
        "completions of a step"
    )
    return Difference("completions of a step", ours, theirs)


def format_install(package: str, recipe: Recipe, *, peft: str = "", vllm: str = "") -> str:
    """Return the command that installs a library, with what adapters and the engine need."""
    packages = [package]
    if recipe.model.lora_rank and peft:
        packages.append(peft)
    if recipe.rollout.engine == "vllm" and vllm:
        packages.append(vllm)
    return f"pip install {' '.join(packages)}"


def describe_correction(rollout: RolloutSettings) -> str:
    """Describe the treatment of the probabilities that the sampler rounds differently."""
    unit, _, treatment = rollout.importance_sampling.partition("_")
    each = "completion" if unit == "sequence" else "token"
    done = "left out" if treatment == "mask" else "lowered to it"
    text = (
        f"each {each} is weighted by its probability in the trainer against vLLM, a ratio above "
        f"{rollout.importance_sampling_cap:g} {done}"
    )
    sampled = {"auto": f"if vLLM sampled, {text}; else {OWN}", "vllm": text, "transformers": OWN}
    return sampled[rollout.engine]


def list_sampler_differences(rollout: RolloutSettings) -> list[Difference]:
    """Return the difference of a library that always starts vLLM to sample."""
    ours = {
        "auto": "vLLM if it is installed on a GPU, else the trainer's own model",
        "transformers": "the trainer's own model",
        "vllm": "a vLLM server" if rollout.vllm_mode == "server" else "",
    }[rollout.engine]
    return [Difference("engine that samples", ours, "vLLM, which it starts")] if ours else []


def format_yaml(settings: Settings, *comments: str) -> str:
    """Return YAML that readers of version 1.1 and 1.2 read alike, below `comments`."""
    lines = [*(f"# {comment}" for comment in comments), *_format_entries(settings, "")]
    return "\n".join(lines) + "\n"


def _format_entries(settings: Settings, indent: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _format_entries(cast("Settings", value), f"{indent}  ")
        else:
            yield f"{indent}{key}: {dump_flow(value)}"
