"""Which sampler a sweep gets, and why: a pure function of what is asked and of the slots."""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_tune.spec.domains import Choice
from gdpo_tune.spec.model import SweepSpec

AUTO = "auto"
LARGE = 300
"""Trials from which a proposal of the Gaussian process takes more than five seconds of a core."""
MANY_OBJECTIVES = 4
"""From here on expected hypervolume is slow to compute and says little about any one objective."""
CROWDED = 32
"""Slots from which proposals of a second or more, one after the other, leave some of them idle."""


@dataclass(frozen=True)
class SamplerChoice:
    """A sampler and the reason for it."""

    name: str
    """A key of `registry.SAMPLERS`, never `auto`."""
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_sampler(spec: SweepSpec, slots: int | None = None) -> SamplerChoice:
    """The sampler that is asked for, or what `auto` picks by the first of these that holds.

    A population, or all trials side by side without an earlier sweep: nothing could be learned, so
    they cover the space evenly.
    Many objectives, many trials, nothing but choices, many slots: TPE. Else the Gaussian process.

    Args:
        spec: the sweep.
        slots: trials at the same time; None where that is not known yet.
    """
    if spec.search.sampler != AUTO:
        return SamplerChoice(spec.search.sampler, "asked for")
    if spec.search.scheduler.type == "pbt":
        return SamplerChoice("qmc", "the members of a population begin spread over the space")
    trials, objectives = most_trials(spec), len(spec.objectives)
    domains = spec.space.searched.values()
    alone = slots is not None and slots >= trials and not spec.search.warm_start
    if alone:
        return SamplerChoice(
            "qmc", f"all {trials} trials run side by side, so none can learn from another"
        )
    if objectives >= MANY_OBJECTIVES:
        return SamplerChoice("tpe", f"{objectives} objectives are too many for a Gaussian process")
    if trials > LARGE:
        return SamplerChoice(
            "tpe", f"a Gaussian process of {trials} trials takes many seconds a proposal"
        )
    if domains and all(isinstance(domain, Choice) for domain in domains):
        return SamplerChoice("tpe", "every parameter is a choice, and choices have no distance")
    if slots is not None and slots > CROWDED:
        return SamplerChoice("tpe", f"{slots} slots would wait for proposals of a Gaussian process")
    plural = "s" if objectives > 1 else ""
    return SamplerChoice(
        "gp",
        f"{trials} trials of {len(domains)} parameters and {objectives} objective{plural}: few "
        "enough for a Gaussian process, which learns most from each",
    )


def most_trials(spec: SweepSpec) -> int:
    """Configurations that the sweep can afford, at most."""
    search = spec.search
    limits = [search.trials]
    if search.budget.trials:
        limits.append(search.budget.trials)
    if search.budget.completions and search.scheduler.type == "fifo":
        each = spec.training.steps * spec.training.completions_per_step
        limits.append(-(-search.budget.completions // each))
    return min(limits)
