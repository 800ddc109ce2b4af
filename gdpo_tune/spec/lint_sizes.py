"""Doubts about how large something is: values far from those in use, crowds, and endless sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gdpo_tune.spec.domains import Number, Uniform
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import show
from gdpo_tune.spec.sampling_budget import total
from gdpo_tune.spec.schedulers import AshaSettings
from gdpo_tune.spec.space import Space

FEWEST_CPUS = 0.25
"""Of a trial that computes on CPUs; with less than this more than four share a core."""
MOST_COMPLETIONS = 10**9
"""Of a sweep; the recipes for a GPU that ship take some millions."""
PACE = 1000
"""Completions a second: more than one GPU samples."""


class Usual(NamedTuple):
    """Values that a parameter has in practice, with ample room, and what comes of others."""

    low: float
    high: float
    below: str
    above: str


USUAL = {
    "learning_rate": Usual(
        1e-9,
        0.1,
        "weights in 32 bits do not change by so little, so nothing is learnt",
        "one step moves a weight by more than most weights are large",
    ),
    "temperature": Usual(
        0.05,
        5.0,
        "the completions of a group come out alike, so nothing can be compared",
        "tokens are drawn nearly at random",
    ),
    "num_iterations": Usual(
        1, 64, "", "most passes over a step's samples train on what the policy no longer writes"
    ),
}


def far_values(spec: SweepSpec) -> Iterator[str]:
    """Parameters that leave the range in which training works at all."""
    for name, usual in USUAL.items():
        low, high = ends(spec.space, name)
        for value, off, why in (
            (low, low < usual.low, usual.below),
            (high, high > usual.high, usual.above),
        ):
            if off:
                yield (
                    f"space.{name}: at {show(value)} {why}. Stay within {show(usual.low)} and "
                    f"{show(usual.high)}."
                )


def ends(space: Space, name: str) -> tuple[Number, Number]:
    """The lowest and the highest value that a trial can have of a parameter with numbers."""
    domain = space.domains[name]
    if isinstance(domain, Uniform):
        return domain.low, domain.high
    values = [value for value in domain.values() or () if isinstance(value, int | float)]
    return min(values), max(values)


def crowded_cores(spec: SweepSpec) -> Iterator[str]:
    """A core for many trials."""
    cpus = spec.resources.cpus
    if cpus < FEWEST_CPUS and not spec.resources.gpus:
        yield (
            f"resources.cpus = {show(cpus)}: {int(1 / cpus):,} trials share a core, each with a "
            "policy of its own in memory, and none is done earlier. Give a trial at least "
            f"{FEWEST_CPUS}."
        )


def too_short_for_rungs(spec: SweepSpec) -> Iterator[str]:
    """Trials of so few steps that no rung lies before the last one."""
    chosen, steps = spec.search.scheduler, spec.training.steps
    if isinstance(chosen, AshaSettings) and not chosen.levels(steps):
        yield (
            f"training.steps = {steps}: no rung lies before the last step, so no trial is "
            "compared with another and all run to their end. Train longer, or write "
            "search.scheduler: {type: fifo}."
        )


def idle_patience(spec: SweepSpec) -> Iterator[str]:
    """Patience that outlasts the search."""
    patience, trials = spec.search.patience, spec.search.trials
    if patience >= trials:
        yield (
            f"search.patience = {patience}: with search.trials = {trials} it never ends the "
            f"search. Write less than {trials}, or remove it."
        )


def points_left_out(spec: SweepSpec) -> Iterator[str]:
    """More points to try first than there are trials."""
    points = {tuple(sorted(point.items())) for point in spec.enqueue}
    trials = spec.search.trials
    if len(points) > trials:
        yield (
            f"enqueue: {len(points)} different points, and search.trials = {trials}, so the last "
            f"ones are never run. Write trials: {len(points)} or more, or fewer points."
        )


def endless(spec: SweepSpec) -> Iterator[str]:
    """A budget that nobody waits for."""
    completions = total(spec)
    if completions > MOST_COMPLETIONS:
        days = completions / PACE / 86_400
        yield (
            f"search.trials, training.steps and their like: {completions:,} completions in all, "
            f"which at {PACE:,} a second take {days:,.0f} days. Lower the largest of them."
        )
