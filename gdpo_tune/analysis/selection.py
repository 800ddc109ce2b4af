"""Choice of one member of a front: the knee, or the extreme in a metric.

Shapes: T points, M objectives; `values[T, M]` are finite and in the units of the objectives. Losses
are scaled to 0 (best of the points) ... 1 (worst of the points).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from gdpo_tune.analysis.pareto import Floats, compute_losses
from gdpo_tune.analysis.probability import compute_quantile
from gdpo_tune.core.trials import Estimate, Objective


def find_knee(
    values: ArrayLike, objectives: Sequence[Objective], preferred: Sequence[bool] = ()
) -> int | None:
    """Return the index of the best compromise of a front; None for an empty front.

    The knee has the smallest sum of scaled losses among the points that are no extremes, or among
    all points if all are. An extreme gives up the other objectives for a single one. For two
    objectives that is the point farthest below the line between the two extremes; for more,
    farthest along the equal-weights normal. Ties go to the smaller worst loss, then to the first
    point. An objective in which all points agree does not count. Points that are `preferred`
    (`bool[T]`; empty: none are) come before all others.

    Source: Das 1999, On characterizing the "knee" of the Pareto curve based on normal-boundary
    intersection; Branke et al. 2004, Finding knees in multi-objective optimization.
    """
    scaled = _scale_losses(values, objectives)
    if len(scaled) == 0:
        return None
    ends = set(find_extremes(values, objectives).values())
    inner = np.array([index not in ends for index in range(len(scaled))]) | (
        len(ends) == len(scaled)
    )
    # Rounded, so that sums that differ in the last bit alone are the ties that they should be.
    others = ~np.array(preferred or [False] * len(scaled))
    order = np.lexsort((scaled.max(axis=1), scaled.sum(axis=1).round(9), ~inner, others))
    return int(order[0])


def find_extremes(values: ArrayLike, objectives: Sequence[Objective]) -> dict[str, int]:
    """Return objective name -> index of the best point in it; empty for an empty front.

    Ties go to the point that is better in the other objectives, then to the first.
    """
    scaled = _scale_losses(values, objectives)
    if len(scaled) == 0:
        return {}
    return {
        objective.name: find_smallest(column, values, objectives)
        for objective, column in zip(objectives, scaled.T, strict=True)
    }


def find_smallest(
    column: Sequence[float] | Floats, values: ArrayLike, objectives: Sequence[Objective]
) -> int:
    """Return the index of the smallest value in a column `[T]` that need not be an objective.

    Ties go to the point that is better in the objectives, then to the first.
    """
    return int(np.lexsort((_scale_losses(values, objectives).sum(axis=1), np.asarray(column)))[0])


def subtract_estimates(one: Estimate, other: Estimate) -> Estimate:
    """Return the difference of two values, with an interval by square-and-add.

    Source: Newcombe 1998, Interval estimation for the difference between independent proportions;
    Zou and Donner 2008 (intervals of any kind).
    """
    gap = one.mean - other.mean
    low = gap - math.hypot(one.mean - one.low, other.high - other.mean)
    high = gap + math.hypot(one.high - one.mean, other.mean - other.low)
    return Estimate(gap, math.hypot(one.se, other.se), low, high, df=max(one.df, other.df))


def is_above(one: Estimate, other: Estimate, comparisons: int = 1) -> bool:
    """Return whether a value is higher than another by more than the noise of `comparisons`."""
    gap = subtract_estimates(one, other)
    wider = compute_quantile(gap.df, comparisons) / compute_quantile(gap.df)
    return gap.mean > wider * (gap.mean - gap.low)


def _scale_losses(values: ArrayLike, objectives: Sequence[Objective]) -> Floats:
    points = compute_losses(values, objectives)
    if len(points) == 0:
        return points
    best = points.min(axis=0)
    span = points.max(axis=0) - best
    return (points - best) / np.where(span > 0, span, 1.0)
