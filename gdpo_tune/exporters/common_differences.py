"""Differences that several libraries have, and the rows of the page that tell them.

Sizes in the texts are those of the batch that `docs/export.md` describes; tests measure them.
"""

from __future__ import annotations

from gdpo_tune.core.settings import RolloutSettings
from gdpo_tune.exporters.base import START, Difference
from gdpo_tune.exporters.recipe import Recipe

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
MEASURED = "measured"
"""Word in a difference whose size tests measure."""


def list_common_differences(
    recipe: Recipe,
    *,
    eps: str,
    whitening: str,
    missing: str,
    precision: str = "",
    follows_device: bool = False,
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
    is what it computes in, if the file cannot say so; `follows_device` tells whether `run.sh`
    chooses that by the device, as a trial does; `correction` is how it weights what vLLM samples;
    `bnpo` is what it averages the loss of BNPO over, if a mini-batch is divided;
    `kl_gradient` is the gradient of its KL, where it lacks TRL's `use_bias_correction_kl`;
    `clamps_kl` tells whether it clamps that KL; `step_tokens` are those that divide the loss of an
    optimizer step on a part of the samples; `unanimous` is the largest advantage, under GDPO, in
    groups whose rewards are all equal.
    """
    rows: list[Difference] = []
    if recipe.training.optimizer == "adamw_8bit":
        rows.append(Difference("averages of AdamW", "8 bits a number", "32 bits a number"))
    is_auto = recipe.model.dtype == "auto" and not follows_device
    if is_auto or (precision and recipe.model.dtype == "float32"):
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
    if step_tokens and recipe.training.mini_batches > 1 and recipe.loss in ("dapo", "cispo"):
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


def list_batch_differences(recipe: Recipe) -> list[Difference]:
    """Return the samples of an optimizer step, by a library that divides them in their order."""
    if recipe.training.mini_batches == 1:
        return []
    ours = "drawn at random from all completions of a step"
    theirs = "completions that follow one another, so whole groups where they fit"
    return [Difference("completions of an optimizer step", ours, theirs)]


def describe_devices(recipe: Recipe, key: str) -> Difference:
    """Return the batch on several GPUs, whose number is a `key` that is an argument, too."""
    ours = f"{recipe.training.completions_per_step} on one device"
    theirs = (
        f"the same on one GPU, `{key}`; with more, `{START} {key}=8`, which have to divide the "
        "completions of a step"
    )
    return Difference("completions of a step", ours, theirs)


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
