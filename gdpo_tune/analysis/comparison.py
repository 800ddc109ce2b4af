"""Two searches against each other: is one front better, and could that be luck?

A search is compared by the configurations that it tried, baselines left out: each is one draw of
what that search does, with the noise of its training and its evaluation in it. What is asked is
whether both sides could have come out of the same urn:

    p            configurations are dealt out to the sides anew, 999 times; the share of deals in
                 which the difference is as large as the one seen, two-sided. Exact whatever the
                 distribution and the sizes, if configurations are drawn independently of one
                 another; docs/comparison.md has what a sampler with a model makes of it.
    intervals    configurations are drawn again with replacement, each side its own, 500 times.
    correction   Holm over all tests of a page: the hypervolume, and each objective.

A larger search has a better front by its size alone, so hypervolumes are compared at the smaller
side's number of configurations: the mean over random choices of as many of the larger one's. A
trial that was stopped at a rung counts as a configuration that adds nothing, as does one that
breaks a constraint; failed trials are left out. Two modes of one sweep are compared objective by
objective over configurations that no model proposed: a model that found one mode good in one corner
tries more of that mode there, which is no merit of the mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import moocore
import numpy as np

from gdpo_tune.analysis.attainment import coverage
from gdpo_tune.analysis.pareto import Floats, loss_hypervolume, losses, reference_losses
from gdpo_tune.analysis.probability import Interval
from gdpo_tune.analysis.resampling import (
    Indices,
    drawn_again,
    holm,
    middle,
    permutation_p,
    smallest_p,
)
from gdpo_tune.analysis.selection import CLEAR
from gdpo_tune.analysis.sides import Side, front_of, volume_at
from gdpo_tune.core.trials import Objective

ALPHA = 0.04
"""Corrected p up to which a difference is called. A little below the .05 that is promised: 999
deals are not all deals, and a sampler's proposals are not quite independent."""


@dataclass(frozen=True)
class Effect:
    """A difference between the sides."""

    value: float
    interval: Interval
    """Of `value`, at 95 %."""
    p: float
    corrected: float
    """`p` by Holm's rule."""


@dataclass(frozen=True)
class Best:
    """The best value of an objective on each side, and how sure each is."""

    left: float
    left_error: float
    right: float
    right_error: float


@dataclass(frozen=True)
class Comparison:
    """How two searches differ."""

    left: Side
    right: Side
    count: int
    """Configurations at which hypervolumes are compared."""
    hypervolumes: tuple[float, float]
    """Of each side, at `count` configurations."""
    ratio: Effect
    """The left one's hypervolume over the right one's, at `count` configurations."""
    superiority: dict[str, Effect]
    """Objective -> chance that a configuration of the left side is better than one of the right
    one, ties half."""
    best: dict[str, Best]
    """Objective -> the best feasible values; an objective is missing while a side has none."""
    coverage: tuple[tuple[float, Interval], tuple[float, Interval]]
    """Share of the right front that the left one matches or beats, and the other way round."""
    attained: tuple[tuple[float, Interval], tuple[float, Interval]]
    """Share of the box from the references to the best values seen that the left front attains and
    the right one does not, and the other way round."""
    smallest_p: float
    """What the hypervolume's corrected p can come to at least, given the number of trials."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Those of both sides."""
        return self.left.objectives


def compare(left: Side, right: Side) -> Comparison:
    """Every difference between two sides with equal objectives; works for empty ones."""
    goals = left.objectives
    count = min(left.tried, right.tried)
    ratio_p, *tests = p_values(left, right)
    corrected = holm([ratio_p, *tests])
    hypervolumes = volume_at(left, count), volume_at(right, count)
    seen = _ratio(*hypervolumes)
    ratio = Effect(seen, _ratio_interval(left, right, count, seen), ratio_p, corrected[0])
    return Comparison(
        left=left,
        right=right,
        count=count,
        hypervolumes=hypervolumes,
        ratio=ratio,
        superiority={
            goal.name: Effect(*_superiority(left, right, index), tests[index], corrected[1 + index])
            for index, goal in enumerate(goals)
        },
        best=_best(left, right),
        coverage=_coverage(left, right),
        attained=_attained(left, right),
        smallest_p=min(1.0, smallest_p(left.tried, right.tried) * (1 + len(goals))),
    )


def p_values(left: Side, right: Side) -> list[float]:
    """Of the hypervolume and of each objective, before any correction."""
    objectives = [_objective_p(left, right, index) for index in range(len(left.objectives))]
    return [_hypervolume_p(left, right), *objectives]


def _hypervolume_p(left: Side, right: Side) -> float:
    """Of the difference in hypervolume between the sides."""
    both, reference = np.vstack([left.points, right.points]), reference_losses(left.objectives)
    # A NaN is not below the reference either.
    inside = np.all(both < reference, axis=1)
    measure = moocore.Hypervolume(ref=reference)

    def volume(rows: Indices) -> float:
        kept = rows[inside[rows]]
        return float(measure(both[kept])) if len(kept) else 0.0

    def ahead(deals: Indices) -> Floats:
        return np.array([volume(d[: left.tried]) - volume(d[left.tried :]) for d in deals])

    return permutation_p(left.tried, right.tried, ahead)


def _objective_p(left: Side, right: Side, index: int) -> float:
    """Of the ranks of an objective among measured configurations (Mann and Whitney)."""
    mine, others = _column(left, index), _column(right, index)
    ranks = _mid_ranks(np.concatenate([mine, others]))
    return permutation_p(
        len(mine), len(others), lambda deals: -ranks[deals[:, : len(mine)]].sum(axis=1)
    )


def _superiority(left: Side, right: Side, index: int) -> tuple[float, Interval]:
    mine, others = _column(left, index), _column(right, index)
    if not len(mine) or not len(others):
        return 0.5, Interval(0.0, 1.0)
    wins = (mine[:, None] < others[None, :]) + 0.5 * (mine[:, None] == others[None, :])
    again = [float(wins[np.ix_(i, j)].mean()) for i, j in drawn_again(len(mine), len(others))]
    return float(wins.mean()), middle(again)


def _column(side: Side, index: int) -> Floats:
    goal = side.objectives[index]
    values = [[c.mean[goal.name].mean] for c in side.independent]
    return losses(values, [goal])[:, 0]


def _mid_ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def _ratio(left: float, right: float) -> float:
    if right > 0:
        return left / right
    return math.inf if left > 0 else math.nan


def _ratio_interval(left: Side, right: Side, count: int, seen: float) -> Interval:
    """Of the ratio, were searches of `count` configurations done again: the bootstrap's spread.

    Around the ratio seen, on a log scale: a front of configurations that are drawn again lies below
    the one seen, and not equally far on sides of different size, so the quantiles themselves would
    be off. Where a front vanishes in some draws the quantiles are all there is.
    """
    goals = left.objectives
    if math.isnan(seen):
        return Interval(0.0, math.inf)
    again = [
        _ratio(
            loss_hypervolume(left.points[mine], goals),
            loss_hypervolume(right.points[others], goals),
        )
        for mine, others in drawn_again(left.tried, right.tried, count)
    ]
    if not all(0 < ratio < math.inf for ratio in again):
        found = middle(again)
        return Interval(min(seen, found.low), max(seen, found.high))
    reach = math.exp(CLEAR * float(np.std(np.log(again))))
    return Interval(seen / reach, seen * reach)


def _best(left: Side, right: Side) -> dict[str, Best]:
    found: dict[str, Best] = {}
    for goal in left.objectives:
        sign = -1.0 if goal.direction == "maximize" else 1.0
        tops = [
            min(
                (c.mean[goal.name] for c in side.configurations if c.feasible),
                key=lambda estimate: sign * estimate.mean,
                default=None,
            )
            for side in (left, right)
        ]
        mine, others = tops
        if mine is not None and others is not None:
            found[goal.name] = Best(mine.mean, mine.se, others.mean, others.se)
    return found


def _coverage(left: Side, right: Side) -> tuple[tuple[float, Interval], tuple[float, Interval]]:
    again = [(front_of(a), front_of(b)) for a, b in _fronts_again(left, right)]
    mine, others = coverage(left.front, right.front), coverage(right.front, left.front)
    return (
        (mine, _share(mine, [coverage(a, b) for a, b in again])),
        (others, _share(others, [coverage(b, a) for a, b in again])),
    )


def _attained(left: Side, right: Side) -> tuple[tuple[float, Interval], tuple[float, Interval]]:
    goals = left.objectives
    both = np.vstack([left.points, right.points])
    whole = both[np.isfinite(both).all(axis=1)]
    if not len(whole):
        return (0.0, Interval(0.0, 1.0)), (0.0, Interval(0.0, 1.0))
    reference = losses([[goal.reference for goal in goals]], goals)[0]
    box = float(np.prod(np.maximum(reference - whole.min(axis=0), 0.0))) or 1.0

    def only(a: Floats, b: Floats) -> tuple[float, float]:
        union = loss_hypervolume(np.vstack([a, b]), goals)
        mine, others = loss_hypervolume(a, goals), loss_hypervolume(b, goals)
        return (union - others) / box, (union - mine) / box

    seen = only(left.points, right.points)
    again = [only(a, b) for a, b in _fronts_again(left, right)]
    return (
        (seen[0], _share(seen[0], [mine for mine, _ in again])),
        (seen[1], _share(seen[1], [others for _, others in again])),
    )


def _fronts_again(left: Side, right: Side) -> list[tuple[Floats, Floats]]:
    if not left.tried or not right.tried:
        return []
    return [
        (left.points[mine], right.points[others])
        for mine, others in drawn_again(left.tried, right.tried)
    ]


def _share(seen: float, again: Sequence[float]) -> Interval:
    """Of a share: what drawing again makes of it, moved to lie about the share seen.

    Fronts of configurations that are drawn again are all a little worse, so they miss one another
    more often than the ones seen.
    """
    known = np.asarray(again, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not known.size or math.isnan(seen):
        return Interval(0.0, 1.0)
    found = middle(known + seen - known.mean())
    return Interval(min(seen, max(0.0, found.low)), max(seen, min(1.0, found.high)))
