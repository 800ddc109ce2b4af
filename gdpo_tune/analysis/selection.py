"""Which member of a front to take: the knee, the extremes, or the best under weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from gdpo_tune.analysis.pareto import Floats, losses
from gdpo_tune.core.trials import Estimate, Objective

CLEAR = 1.96
"""Standard errors of a difference beyond which noise alone is an unlikely reason for it."""


def knee(values: ArrayLike, objectives: Sequence[Objective]) -> int | None:
    """Index of the front's best compromise, None for an empty front.

    Each loss is scaled to 0 (the front's best) ... 1 (the front's worst); the knee has the smallest
    sum among the points that are no extreme, since an extreme gives everything for one objective;
    among all if there are no others. For two objectives that is the point farthest below the line
    between the two extremes; for more, farthest along the equal-weights normal. Ties go to the
    smaller worst loss, then to the first point. An objective in which all members agree does not
    count.

    Args:
        values: `[T, M]`, finite, mutually non-dominated.
        objectives: M of them.

    Source: Das 1999, On characterizing the "knee" of the Pareto curve based on normal-boundary
    intersection; Branke et al. 2004, Finding knees in multi-objective optimization.
    """
    scaled = _scaled_losses(values, objectives)
    if len(scaled) == 0:
        return None
    ends = set(extremes(values, objectives).values())
    inner = np.array([index not in ends for index in range(len(scaled))]) | (
        len(ends) == len(scaled)
    )
    # Rounded, so that sums that differ in the last bit alone are the ties that they should be.
    order = np.lexsort((scaled.max(axis=1), scaled.sum(axis=1).round(9), ~inner))
    return int(order[0])


def extremes(values: ArrayLike, objectives: Sequence[Objective]) -> dict[str, int]:
    """Objective name -> index of the point that is best in it; empty for an empty front.

    Ties go to the point that is better in the other objectives, then to the first.
    """
    scaled = _scaled_losses(values, objectives)
    if len(scaled) == 0:
        return {}
    total = scaled.sum(axis=1)
    return {
        objective.name: int(np.lexsort((total, scaled[:, column]))[0])
        for column, objective in enumerate(objectives)
    }


def preferred(
    values: ArrayLike, objectives: Sequence[Objective], weights: Sequence[float]
) -> int | None:
    """Index of the point with the smallest weighted sum of scaled losses, None for no points.

    Losses are scaled as for the knee, so that a weight says how much of one objective's span among
    the points is worth how much of another's. Ties go to the smaller unweighted sum, then to the
    first point. A weighted sum never finds a point in a dent of the front: bounds do.

    Args:
        values: `[T, M]`, finite.
        objectives: M of them.
        weights: M, not negative, at least one above 0.
    """
    scaled = _scaled_losses(values, objectives)
    if len(scaled) == 0:
        return None
    shares = np.asarray(weights, dtype=float) / max(weights)
    total = (scaled @ shares).round(9)
    return int(np.lexsort((scaled.sum(axis=1), total))[0])


def farthest(
    column: Sequence[float],
    values: ArrayLike,
    objectives: Sequence[Objective],
    *,
    largest: bool,
) -> int | None:
    """Index of the point that is largest, or smallest, in a metric; None for no points.

    Ties go to the point that is better in the objectives, then to the first.

    Args:
        column: `[T]` values of the metric, which need not be an objective.
        values: `[T, M]` of the objectives.
        objectives: M of them.
        largest: or the smallest.
    """
    scaled = _scaled_losses(values, objectives)
    if len(scaled) == 0:
        return None
    ranked = -np.asarray(column) if largest else np.asarray(column)
    return int(np.lexsort((scaled.sum(axis=1), ranked))[0])


def is_ahead(leader: Estimate, rivals: Sequence[Estimate]) -> bool:
    """Whether `leader` differs from each of its rivals by more than `CLEAR` standard errors."""
    return all(
        abs(leader.mean - rival.mean) > CLEAR * math.hypot(leader.se, rival.se) for rival in rivals
    )


def _scaled_losses(values: ArrayLike, objectives: Sequence[Objective]) -> Floats:
    """Losses `[T, M]` scaled to 0 (best of the front) ... 1 (worst of the front)."""
    points = losses(values, objectives)
    if len(points) == 0:
        return points
    best = points.min(axis=0)
    span = points.max(axis=0) - best
    return (points - best) / np.where(span > 0, span, 1.0)
