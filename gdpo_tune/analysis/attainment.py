"""Goals that a set of points attains, and the share of several sets that attain them.

Shapes: T points, G goals, M objectives; points and goals are losses (smaller is better). A goal is
attained if some point is at least as good in every objective. A row with NaN attains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import Floats

CHUNK = 2_000_000
"""Comparisons at a time, so that memory stays small."""


def find_attained(points: Floats, goals: Floats) -> NDArray[np.bool_]:
    """Mark the goals that some point attains, `bool[G]`."""
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


def compute_attainment(sets: Iterable[Floats], goals: Floats) -> Floats:
    """Return the share of sets that attain each goal, `float[G]`: empirical attainment.

    Source: Grunert da Fonseca, Fonseca and Hall 2001, Inferential performance assessment of
    stochastic optimisers and the attainment function.
    """
    counts, total = np.zeros(len(goals)), 0
    for points in sets:
        counts += find_attained(points, goals)
        total += 1
    return counts / max(total, 1)


def compute_coverage(left: Floats, right: Floats) -> float:
    """Return the share of the front `right` that the front `left` matches or beats; NaN for none.

    Not symmetric: compute it in both directions.
    Source: Zitzler and Thiele 1999 (the C-metric).
    """
    return float(find_attained(left, right).mean()) if len(right) else float("nan")
