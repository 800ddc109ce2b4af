"""Figures of `normalization.py` that are pure functions of numbers.

Shapes: S seeds, W weight settings, M objectives, Q goals. `values[S, W, M]` are shares of the range
from each objective's worst value of interest to its best: 1 is perfect, 0 or less is worthless.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import moocore
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TOLERANCE = 1e-3
"""Advantages that are closer than this count as equal: `eps` alone sets them 1e-4 apart."""
GRID = 24
"""Number of goals along each objective."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """Estimate with the middle 95 % of its bootstrap."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Format the interval for a table."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def count_distinct(values: Sequence[float], tolerance: float = TOLERANCE) -> int:
    """Count the different values; neighbours within `tolerance` are equal."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return int((np.diff(ordered) > tolerance).sum()) + 1 if ordered.size else 0


def compute_hypervolume(points: Floats) -> float:
    """Compute the share of the unit box that the points `[W, M]` dominate."""
    inside = points[(points > 0).all(axis=1)]
    if not len(inside):
        return 0.0
    return float(moocore.hypervolume(-inside, ref=np.zeros(points.shape[1])))


def find_front(means: Floats) -> NDArray[np.bool_]:
    """Return for each point of `[W, M]` whether no other one dominates it."""
    return moocore.is_nondominated(-means, keep_weakly=True)


def bootstrap(
    count: int, statistic: Callable[[NDArray[np.int64]], float], seed: int = 0
) -> Interval:
    """Bootstrap a statistic over `count` seeds.

    Few seeds have few different draws (three have ten), so the interval is rather too short than
    too long.

    Args:
        count: S.
        statistic: function of S indices of seeds.
        seed: seed of the resampling.
    """
    rng = np.random.default_rng(seed)
    cache: dict[tuple[int, ...], float] = {}
    drawn: list[float] = []
    for row in np.sort(rng.integers(count, size=(RESAMPLES, count)), axis=1):
        key = tuple(row.tolist())
        if key not in cache:
            cache[key] = statistic(row)
        drawn.append(cache[key])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(statistic(np.arange(count)), float(low), float(high))


def build_goals(objectives: int, grid: int = GRID) -> Floats:
    """Return the midpoints of a regular grid over the unit box, `[Q, M]`."""
    middle = (np.arange(grid) + 0.5) / grid
    return np.array(list(itertools.product(middle, repeat=objectives)))


def compute_attainment(values: Floats, wanted: Floats) -> Floats:
    """Compute for each goal the share of seeds in which a setting reaches it in every objective.

    Source: Grunert da Fonseca, Fonseca and Hall 2001, Inferential performance assessment of
    stochastic optimisers and the attainment function.

    Args:
        values: `[S, W, M]`.
        wanted: `[Q, M]`.
    """
    reached = np.zeros((len(values), len(wanted)), dtype=bool)
    for one, points in zip(reached, values, strict=True):
        for point in points:
            one |= (wanted <= point).all(axis=1)
    return reached.mean(axis=0)


def compute_attainment_difference(values: Floats, others: Floats) -> tuple[float, float]:
    """Compute how much more often each of two sides attains goals than the other.

    Returns:
        Means over all goals of the positive and of the negative part of the difference of both
        attainments. Their difference is that of the sides' mean hypervolumes, up to the grid.
    """
    wanted = build_goals(values.shape[2])
    difference = compute_attainment(values, wanted) - compute_attainment(others, wanted)
    return float(difference.clip(min=0).mean()), float((-difference).clip(min=0).mean())
