"""What every exporter gives back, and how it refuses what its library cannot do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gdpo_tune.core.errors import ExportError, Problem
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.spec.problems import one_of, show

NO_REASONS: Mapping[str, str] = {}
REWARDS_FILE = "rewards.py"
"""What exported files call the module with the reward functions, which a person supplies."""


@dataclass(frozen=True)
class Difference:
    """Something that the library does otherwise than the training that was measured."""

    what: str
    here: str
    there: str


@dataclass(frozen=True)
class Exported:
    """A training in the words of a library."""

    library: str
    """With the version whose source it was written from."""
    file: str
    """Name of the file."""
    text: str
    """Its content."""
    command: str
    """What starts the library on it."""
    differences: tuple[Difference, ...]
    yours: Mapping[str, str]
    """Key -> what a person has to put there."""
    place: str = "the folder of that file"
    """Where the command works."""


@dataclass
class Refusals:
    """What of a recipe the library would change or ignore."""

    recipe: Recipe
    library: str
    found: list[Problem] = field(default_factory=list[Problem])

    def add(self, key: str, value: object, reason: str, fix: str) -> None:
        """Note one setting of the recipe."""
        self.found.append(Problem(self.recipe.note, key, show(value), reason, fix))

    def check(
        self,
        *,
        modes: Collection[str],
        losses: Collection[str],
        schedules: Collection[str] = ("constant", "linear", "cosine"),
        leave_one_out: Collection[str] = (),
        why_not: Mapping[str, str] = NO_REASONS,
    ) -> None:
        """Note what the library has no equal of, and what none has.

        Args:
            modes: normalizations that it knows.
            losses: ways to average token losses that it knows.
            schedules: shapes of the learning rate that it knows.
            leave_one_out: modes under which it can leave one out.
            why_not: mode -> why it does not know that one, where it seems to.
        """
        recipe = self.recipe
        if recipe.mode not in modes:
            known = f"it knows {one_of(modes)}"
            reason = f"{why_not.get(recipe.mode, 'has no such normalization')}; {known}"
            reason = f"{self.library} {reason}"
            self.add("normalization", recipe.mode, reason, "take a trial with one of those")
        elif recipe.leaves_one_out and recipe.mode not in leave_one_out:
            self.add(
                "baseline",
                "leave_one_out",
                f"{self.library} compares with the mean of the whole group under {recipe.mode}",
                "take a trial with baseline: group_mean",
            )
        if recipe.loss not in losses:
            reason = f"{self.library} does not average losses so; it knows {one_of(losses)}"
            self.add("loss_type", recipe.loss, reason, "take a trial with one of those")
        shape = recipe.training.lr_schedule
        if shape not in schedules:
            reason = f"{self.library} does not know it; it knows {one_of(schedules)}"
            self.add("training.lr_schedule", shape, reason, "--set training.lr_schedule=constant")
        if recipe.gamma > 0:
            reason = "no library makes the weights depend on how saturated a reward is"
            self.add("gamma", recipe.gamma, reason, "take a trial with gamma: 0")
        if recipe.schedule:
            self.add(
                "schedule",
                f"{len(recipe.schedule)} changes",
                "no library changes weights or learning rate on the way; this trial is the member "
                "of a population, whose values did",
                "train it here: gdpo_tune.train --from",
            )

    def raise_if_any(self) -> None:
        """Raise all of them.

        Raises:
            ExportError: if there are any.
        """
        if self.found:
            raise ExportError(self.library, tuple(self.found))


PRECISION = {"auto": "bfloat16 on a GPU, float32 elsewhere", "float32": "float32"}
"""`model.dtype` -> what the training computed in, where a library may compute in something else."""
_CORRECTED = "each completion is weighted by how likely the trainer finds it against vLLM"
SAMPLED = {
    "auto": f"where vLLM sampled, {_CORRECTED}; elsewhere the trainer's own model sampled",
    "vllm": _CORRECTED,
    "transformers": "the trainer's own model sampled",
}
"""`rollout.engine` -> what became of probabilities that the sampler rounds otherwise."""


def same_everywhere(
    recipe: Recipe,
    *,
    eps: str,
    whitening: str,
    missing: str,
    precision: str = "",
    correction: str = "",
) -> list[Difference]:
    """Rows that every library has an answer to; a row without an answer is left out.

    Args:
        recipe: what is exported.
        eps: what the library adds to a standard deviation that divides; empty: the same.
        whitening: how it normalises over the batch, under GDPO; empty: the same.
        missing: what it makes of a reward that was not scored; empty: the same.
        precision: what it computes in, if it is not told; empty: it is.
        correction: the switch by which it would weight what vLLM samples; empty: it does so.
    """
    rows: list[Difference] = []
    if recipe.model.dtype == "auto" or (precision and recipe.model.dtype == "float32"):
        own, there = PRECISION[recipe.model.dtype], precision or "bfloat16"
        rows.append(Difference("computed in", own, there))
    if correction:
        there = f"vLLM samples, and nothing is weighted; the switch is `{correction}`"
        own = SAMPLED[recipe.rollout.engine]
        rows.append(Difference("probabilities that the sampler rounds otherwise", own, there))
    if eps:
        rows.append(Difference("added to standard deviations", "1e-4", eps))
    if whitening and not recipe.sums_first:
        own = "mean 0 and standard deviation 1 over the completions of a step, eps 1e-4"
        rows.append(Difference("normalisation over the batch", own, whitening))
    dead = "statistics in float64; a group with equal rewards gets exactly 0"
    rows.append(
        Difference(
            "groups whose rewards are all equal",
            dead,
            "statistics in float32: rounding is divided by a small number, and such a group can "
            "get an advantage that is not 0",
        )
    )
    if missing:
        own = "counts as its group's mean: it neither helps nor hurts"
        rows.append(Difference("a reward that is not scored (`None`)", own, missing))
    return rows


def weighted_sum(rewards: Sequence[tuple[str, float]]) -> str:
    """The sum as a person writes it."""
    return " + ".join(f"{weight:.6g} * {name}" for name, weight in rewards)


def sum_of(recipe: Recipe) -> str:
    """The weighted sum of a recipe's rewards."""
    return weighted_sum([(reward.name, reward.weight) for reward in recipe.rewards])
