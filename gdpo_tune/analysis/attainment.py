"""Which goals a set of points attains, and how often several sets do.

Shapes: T points, G goals, M objectives; points and goals are losses (smaller is better). A goal is
attained where some point is at least as good in every objective. A row with NaN attains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import Floats

CHUNK = 2_000_000
"""Comparisons at a time, so that memory stays small."""


def attained(points: Floats, goals: Floats) -> NDArray[np.bool_]:
    """Which goals some point attains, `bool[G]`."""
    result = np.zeros(len(goals), dtype=np.bool_)
    if not len(points):
        return result
    size = max(1, CHUNK // points.size)
    for start in range(0, len(goals), size):
        chunk = goals[start : start + size]
        result[start : start + size] = (
            (points[:, None, :] <= chunk[None, :, :]).all(axis=2).any(axis=0)
        )
    return result


def attainment(sets: Iterable[Floats], goals: Floats) -> Floats:
    """Share of sets that attain each goal, `float[G]`: the empirical attainment function.

    Source: Grunert da Fonseca, Fonseca and Hall 2001, Inferential performance assessment of
    stochastic optimisers and the attainment function.
    """
    counts, total = np.zeros(len(goals)), 0
    for points in sets:
        counts += attained(points, goals)
        total += 1
    return counts / max(total, 1)


def coverage(left: Floats, right: Floats) -> float:
    """Share of the points of `right` that some point of `left` matches or beats; NaN for none.

    Both are fronts. Not symmetric, so both directions are to be looked at.
    Source: Zitzler and Thiele 1999 (the C-metric).
    """
    return float(attained(left, right).mean()) if len(right) else float("nan")
