"""Choice of the sampler of a sweep, with the reason."""

from __future__ import annotations

from typing import NamedTuple

from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.space import Choices

LARGE = 300
"""Trials from which a proposal of the Gaussian process takes more than five seconds of a core."""
MANY_OBJECTIVES = 4
"""Number of objectives from which expected hypervolume is slow and says little about each."""
CROWDED = 32
"""Slots from which proposals of a second or more, one after the other, leave some of them idle."""


class SamplerChoice(NamedTuple):
    """A sampler and the reason for it."""

    name: str
    """Key of `registry.SAMPLERS`, never `auto`."""
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_sampler(spec: SweepSpec, slots: int | None = None) -> SamplerChoice:
    """Return the requested sampler, or for `auto` that of the first of these rules that holds.

    `qmc` for a population, or if all trials run side by side without an earlier sweep. `tpe` for
    many objectives, many trials, only choices, or many slots. Else `gp`, the Gaussian process.
    `slots` is the number of trials at the same time; None while that is unknown.
    """
    search, domains = spec.search, spec.space.searched_domains.values()
    trials, objectives = count_affordable_trials(spec), len(spec.objectives)
    name, why = "tpe", ""
    if search.sampler != "auto":
        name, why = search.sampler, "as requested"
    elif search.scheduler.type == "pbt":
        name, why = "qmc", "the members of a population begin spread over the space"
    elif slots is not None and slots >= trials and not search.warm_start:
        name, why = "qmc", f"all {trials} trials run side by side, so none can learn from another"
    elif objectives >= MANY_OBJECTIVES:
        why = f"{objectives} objectives are too many for a Gaussian process"
    elif trials > LARGE:
        why = f"a Gaussian process of {trials} trials takes many seconds a proposal"
    elif domains and all(isinstance(domain, Choices) for domain in domains):
        why = "every parameter is a choice, and choices have no distance"
    elif slots is not None and slots > CROWDED:
        why = f"{slots} slots would wait for proposals of a Gaussian process"
    else:
        counts = f"{trials} trials of {len(domains)} parameters and {objectives} objective"
        plural = "s" if objectives > 1 else ""
        name, why = "gp", f"{counts}{plural}: small enough for Gaussian-process search"
    return SamplerChoice(name, why)


def count_affordable_trials(spec: SweepSpec) -> int:
    """Return how many configurations the sweep can afford, at most."""
    search = spec.search
    limits = [search.trials]
    if search.budget.trials:
        limits.append(search.budget.trials)
    if search.budget.completions and search.scheduler.type == "fifo":
        each = spec.training.steps * spec.training.completions_per_step
        limits.append(-(-search.budget.completions // each))
    return min(limits)
