"""Differences between two searches, and their significance.

A search is compared by the configurations that it tried, without baselines. Each is one draw of
what that search does, with the noise of its training and its evaluation. The null hypothesis is
that both sides come from one distribution:

    p            999 permutations of configurations over the sides; the share of permutations in
                 which the difference is as large as the observed one, two-sided. Exact for any
                 distribution and any sizes, if configurations are drawn independently of one
                 another; docs/comparison.md measures it for a sampler with a model.
    intervals    500 bootstrap draws of configurations with replacement, each side its own.
    correction   Holm over all tests of a page: the hypervolume, and each objective.

A larger search has a better front by its size alone. So hypervolumes are compared at the smaller
side's number of configurations, as the mean over random choices of as many of the larger side's. A
trial that was stopped at a rung counts as a configuration that adds nothing, and so does one that
breaks a constraint; failed trials are left out. Objectives are compared over independent
configurations: see `side_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_from

import moocore
import numpy as np

from gdpo_tune.analysis.attainment import compute_coverage
from gdpo_tune.analysis.pareto import (
    Floats,
    compute_loss_hypervolume,
    compute_losses,
    convert_references,
    is_inside,
    select_front,
)
from gdpo_tune.analysis.probability import Interval
from gdpo_tune.analysis.resampling import (
    Indices,
    compute_interval,
    compute_permutation_p,
    compute_smallest_p,
    correct_p_values,
    draw_resamples,
    rank_values,
)
from gdpo_tune.analysis.sides import Side, estimate_hypervolume_at
from gdpo_tune.core.trials import CLEAR, Estimate

ALPHA = 0.04
"""Corrected p up to which a difference is significant. Below the promised .05, because 999
permutations are not all, and a sampler's proposals are not quite independent."""

MOST_LUCK = 2
"""True luck over the luck that draws find, where all candidates are truly equal: docs/noise.md."""

Share = tuple[float, Interval]
"""A share and its interval."""


@dataclass(frozen=True)
class Effect:
    """A difference between the sides."""

    value: float
    interval: Interval
    """Interval of `value`, at 95 %."""
    p: float
    corrected: float
    """`p`, corrected by Holm's rule."""


@dataclass(frozen=True)
class Comparison:
    """Differences between two searches."""

    left: Side
    right: Side
    count: int
    """Configurations at which hypervolumes are compared."""
    hypervolumes: tuple[float, float]
    """Hypervolume of each side, at `count` configurations."""
    ratio: Effect
    """Left hypervolume over right hypervolume, at `count` configurations, each without its luck."""
    superiority: dict[str, Effect]
    """Objective -> chance that a configuration of the left side is better than one of the right
    side; ties count half. Empty if there are too few independent configurations for a difference to
    be significant."""
    best: dict[str, tuple[Estimate, Estimate]]
    """Objective -> the best feasible value of each side; none while a side has no value."""
    coverage: tuple[Share, Share]
    """Share of the right front that the left one matches or beats, and the reverse."""
    attained: tuple[Share, Share]
    """Share of the box from the references to the best observed values that only the left front
    attains, and that only the right one attains."""
    smallest_p: float
    """Smallest corrected p of the hypervolume that the numbers of trials allow."""
    least_size: int
    """Configurations of each side from which a difference can be significant."""


def compare(left: Side, right: Side) -> Comparison:
    """Compute every difference between two sides with equal objectives; sides may be empty."""
    goals = left.objectives
    count = min(left.tried_count, right.tried_count)
    ratio_p, *tests = compute_p_values(left, right)
    corrected = correct_p_values([ratio_p, *tests])
    hypervolumes = estimate_hypervolume_at(left, count), estimate_hypervolume_at(right, count)
    ours, theirs = hypervolumes
    ratio = _divide(ours * (1 - left.luck), theirs * (1 - right.luck))
    ratio_interval = _estimate_ratio_interval(left, right, count, ratio)
    tests_of_page = 1 + len(goals)
    sizes = len(left.independent), len(right.independent)
    return Comparison(
        left=left,
        right=right,
        count=count,
        hypervolumes=hypervolumes,
        ratio=Effect(ratio, ratio_interval, ratio_p, corrected[0]),
        superiority={
            goal.name: Effect(
                *_compute_superiority(left, right, index), tests[index], corrected[1 + index]
            )
            for index, goal in enumerate(goals)
            if compute_smallest_p(*sizes) * tests_of_page <= ALPHA
        },
        best=_find_best(left, right),
        coverage=_compute_coverages(left, right),
        attained=_compute_attained(left, right),
        smallest_p=min(
            1.0, compute_smallest_p(left.tried_count, right.tried_count) * tests_of_page
        ),
        least_size=next(
            n for n in count_from(1) if compute_smallest_p(n, n) <= ALPHA / tests_of_page
        ),
    )


def compute_p_values(left: Side, right: Side) -> list[float]:
    """Compute the p of the hypervolume and of each objective, before any correction."""
    objectives = [_test_objective(left, right, index) for index in range(len(left.objectives))]
    return [_test_hypervolume(left, right), *objectives]


def _test_hypervolume(left: Side, right: Side) -> float:
    both, reference = np.vstack([left.points, right.points]), convert_references(left.objectives)
    inside = is_inside(both, reference)
    points = both[inside]
    owners = np.array([*left.owners, *(left.tried_count + owner for owner in right.owners)])
    owners = owners[inside].astype(np.int64)
    measure = moocore.Hypervolume(ref=reference)

    def compute_volume(rows: Floats) -> float:
        return float(measure(rows)) if len(rows) else 0.0

    def compute_leads(permutations: Indices) -> Floats:
        # Each training takes its candidates along.
        is_ours = np.argsort(permutations, axis=1)[:, owners] < left.tried_count
        return np.array(
            [compute_volume(points[ours]) - compute_volume(points[~ours]) for ours in is_ours]
        )

    ours, theirs = (
        side.luck * compute_loss_hypervolume(side.points, side.objectives) for side in (left, right)
    )
    allowance = MOST_LUCK * (ours - theirs)
    return compute_permutation_p(left.tried_count, right.tried_count, compute_leads, allowance)


def _test_objective(left: Side, right: Side, index: int) -> float:
    """Test the ranks of an objective among measured configurations (Mann and Whitney)."""
    ours, theirs = _get_losses(left, index), _get_losses(right, index)
    ranks = rank_values(np.concatenate([ours, theirs]))
    return compute_permutation_p(
        len(ours), len(theirs), lambda rows: -ranks[rows[:, : len(ours)]].sum(axis=1)
    )


def _compute_superiority(left: Side, right: Side, index: int) -> Share:
    ours, theirs = _get_losses(left, index), _get_losses(right, index)
    if not len(ours) or not len(theirs):
        return 0.5, Interval(0.0, 1.0)
    wins = (ours[:, None] < theirs[None, :]) + 0.5 * (ours[:, None] == theirs[None, :])
    draws = [float(wins[np.ix_(i, j)].mean()) for i, j in draw_resamples(len(ours), len(theirs))]
    return float(wins.mean()), compute_interval(draws)


def _get_losses(side: Side, index: int) -> Floats:
    """Return the losses `[T]` of one objective over the independent configurations."""
    goal = side.objectives[index]
    values = [[c.mean[goal.name].mean] for c in side.independent]
    return compute_losses(values, [goal])[:, 0]


def _divide(left: float, right: float) -> float:
    if right > 0:
        return left / right
    return math.inf if left > 0 else math.nan


def _estimate_ratio_interval(left: Side, right: Side, count: int, ratio: float) -> Interval:
    """Estimate the interval of the ratio for repeated searches of `count` configurations.

    The bootstrap's spread around the observed ratio, on a log scale. Its quantiles would be off: a
    front of configurations drawn again lies below the observed one, and not equally far on sides of
    different size. They are used only where a front vanishes in some draws.
    """
    goals = left.objectives
    if math.isnan(ratio):
        return Interval(0.0, math.inf)
    draws = [
        _divide(
            compute_loss_hypervolume(left.get_points(ours), goals),
            compute_loss_hypervolume(right.get_points(theirs), goals),
        )
        for ours, theirs in draw_resamples(left.tried_count, right.tried_count, count)
    ]
    if not all(0 < draw < math.inf for draw in draws):
        interval = compute_interval(draws)
        return Interval(min(ratio, interval.low), max(ratio, interval.high))
    reach = math.exp(CLEAR * float(np.std(np.log(draws))))
    return Interval(ratio / reach, ratio * reach)


def _find_best(left: Side, right: Side) -> dict[str, tuple[Estimate, Estimate]]:
    ours, theirs = ([c.mean for c in side.configurations if c.feasible] for side in (left, right))
    best: dict[str, tuple[Estimate, Estimate]] = {}
    for goal in left.objectives if ours and theirs else ():
        find = max if goal.direction == "maximize" else min
        best[goal.name] = (
            find((means[goal.name] for means in ours), key=lambda value: value.mean),
            find((means[goal.name] for means in theirs), key=lambda value: value.mean),
        )
    return best


def _compute_coverages(left: Side, right: Side) -> tuple[Share, Share]:
    drawn = [
        (select_front(ours), select_front(theirs)) for ours, theirs in _draw_points(left, right)
    ]
    fronts = [(left.front, right.front), *drawn]
    ours, *our_draws = (compute_coverage(a, b) for a, b in fronts)
    theirs, *their_draws = (compute_coverage(b, a) for a, b in fronts)
    return _add_interval(ours, our_draws), _add_interval(theirs, their_draws)


def _compute_attained(left: Side, right: Side) -> tuple[Share, Share]:
    goals = left.objectives
    both = np.vstack([left.points, right.points])
    measured = both[np.isfinite(both).all(axis=1)]
    if not len(measured):
        return (0.0, Interval(0.0, 1.0)), (0.0, Interval(0.0, 1.0))
    extent = np.maximum(convert_references(goals) - measured.min(axis=0), 0.0)
    box = float(np.prod(extent)) or 1.0

    def measure_gains(ours: Floats, theirs: Floats) -> tuple[float, float]:
        union = compute_loss_hypervolume(np.vstack([ours, theirs]), goals)
        alone = compute_loss_hypervolume(ours, goals), compute_loss_hypervolume(theirs, goals)
        return (union - alone[1]) / box, (union - alone[0]) / box

    ours, theirs = measure_gains(left.points, right.points)
    draws = [measure_gains(a, b) for a, b in _draw_points(left, right)]
    return (
        _add_interval(ours, [draw for draw, _ in draws]),
        _add_interval(theirs, [draw for _, draw in draws]),
    )


def _draw_points(left: Side, right: Side) -> list[tuple[Floats, Floats]]:
    """Draw the points of both sides again with replacement; nothing if a side is empty."""
    if not left.tried_count or not right.tried_count:
        return []
    return [
        (left.get_points(ours), right.get_points(theirs))
        for ours, theirs in draw_resamples(left.tried_count, right.tried_count)
    ]


def _add_interval(share: float, draws: Sequence[float]) -> Share:
    """Return a share with its interval: that of the bootstrap draws, centred on the share.

    Fronts of configurations drawn again are all a little worse, so they miss one another more often
    than the observed ones.
    """
    shares = np.asarray(draws, dtype=np.float64)
    shares = shares[~np.isnan(shares)]
    if not shares.size or math.isnan(share):
        return share, Interval(0.0, 1.0)
    interval = compute_interval(shares + share - shares.mean())
    return share, Interval(min(share, max(0.0, interval.low)), max(share, min(1.0, interval.high)))
