"""Dominance, ranks, hypervolume and coverage of objective values.

Shapes: T points, M objectives; `values[T, M]` in the units and directions of the objectives.
Inside this room everything is a loss (smaller is better): `compute_losses` flips the directions
once. A row with NaN or infinity was not measured: it is never on a front and adds no hypervolume.
"""

from __future__ import annotations

from collections.abc import Sequence

import moocore
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.core.trials import Objective

Floats = NDArray[np.float64]
NOT_RANKED = -1
"""Rank of a point that was not measured."""
CHUNK = 2_000_000
"""Comparisons at a time, so that memory stays small."""


def compute_losses(values: ArrayLike, objectives: Sequence[Objective]) -> Floats:
    """Return values as losses `[T, M]`: maximised objectives change their sign.

    A ValueError says that values, if any, do not have a column for each objective.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return np.empty((0, len(objectives)))
    if array.ndim != 2 or array.shape[1] != len(objectives):
        raise ValueError(f"values of shape {array.shape} for {len(objectives)} objectives")
    return array * [-1.0 if goal.direction == "maximize" else 1.0 for goal in objectives]


def rank_points(values: ArrayLike, objectives: Sequence[Objective]) -> NDArray[np.int64]:
    """Sort points into fronts, `int[T]`: 0 is the front, 1 the front of the remaining points, ...

    Equal points share a rank; a point that was not measured has `NOT_RANKED`.
    Source: Deb et al. 2002, A fast and elitist multiobjective genetic algorithm (NSGA-II).
    """
    points = compute_losses(values, objectives)
    result = np.full(len(points), NOT_RANKED, dtype=np.int64)
    # moocore crashes or never returns when it meets NaN, so such rows must not reach it.
    measured = np.isfinite(points).all(axis=1)
    if measured.any():
        result[measured] = moocore.pareto_rank(points[measured])
    return result


def mark_front(points: Floats) -> NDArray[np.bool_]:
    """Mark the losses `[T, M]` that no other point dominates, `bool[T]`; none that holds NaN."""
    result: NDArray[np.bool_] = np.all(np.isfinite(points), axis=1)
    if result.any():
        result[result] = moocore.is_nondominated(points[result], keep_weakly=True)
    return result


def select_front(points: Floats) -> Floats:
    """Return the non-dominated rows of losses `[T, M]`, without those that hold NaN."""
    return points[mark_front(points)]


def compute_hypervolume(values: ArrayLike, objectives: Sequence[Objective]) -> float:
    """Return the volume between the points and the objectives' fixed references; 0 for no points.

    A point that is not better than the reference in every objective contributes nothing.
    Source: Zitzler and Thiele 1999, Multiobjective evolutionary algorithms: a comparative case
    study and the strength Pareto approach.
    """
    return compute_loss_hypervolume(compute_losses(values, objectives), objectives)


def compute_loss_hypervolume(points: Floats, objectives: Sequence[Objective]) -> float:
    """Return the hypervolume of losses `[T, M]`."""
    reference = convert_references(objectives)
    inside = is_inside(points, reference)
    if not inside.any():
        return 0.0
    return float(moocore.hypervolume(points[inside], ref=reference))


def compute_contributions(values: ArrayLike, objectives: Sequence[Objective]) -> Floats:
    """Return what the front's hypervolume would lose without each of its points, `float[T]`.

    Volume that a dominated point also covers counts as lost. 0 for a point that is dominated, equal
    to another one, or not better than the reference in every objective.
    """
    points, reference = compute_losses(values, objectives), convert_references(objectives)
    if len(objectives) == 1:  # moocore wants two: a width of 1 changes no volume
        points, reference = np.pad(points, ((0, 0), (0, 1))), np.append(reference, 1.0)
    result = np.zeros(len(points))
    inside = is_inside(points, reference)
    if inside.any():
        result[inside] = moocore.hv_contributions(points[inside], ref=reference)
    return result


def is_inside(points: Floats, reference: Floats) -> NDArray[np.bool_]:
    """Mark the finite losses that are better than the reference in every objective, `bool[T]`."""
    return np.all(np.isfinite(points) & (points < reference), axis=1)


def convert_references(objectives: Sequence[Objective]) -> Floats:
    """Return the references of the objectives as losses, `float[M]`."""
    return compute_losses([[objective.reference for objective in objectives]], objectives)[0]


def compute_coverage(left: Floats, right: Floats) -> float:
    """Return the share of the front `right` that the front `left` matches or beats; NaN for none.

    Source: Zitzler and Thiele 1999 (the C-metric, which is not symmetric).
    """
    if not len(right):
        return float("nan")
    chunks = np.array_split(right, left.size * len(right) // CHUNK + 1)
    matched = [(left[:, None] <= chunk).all(axis=2).any(axis=0) for chunk in chunks]
    return float(np.concatenate(matched).mean())
