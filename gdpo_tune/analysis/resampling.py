"""Tests and intervals without a noise model: permutations, the bootstrap, ranks and Holm's rule.

The unit is a configuration with all its seeds: permutations and the bootstrap move whole ones.
Everything is seeded, so equal input gives an equal result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.analysis.probability import LEVEL, Interval

PERMUTATIONS = 999
"""With the observed one 1,000: the smallest p is .002, two-sided."""
RESAMPLES = 500
ROUNDING = 1e-9
"""Share of the largest value up to which values are equal."""

Indices = NDArray[np.int64]
Statistic = Callable[[Indices], Floats]
"""Permutations `[D, rows]`, the first group's rows first -> `[D]`, larger where it is ahead."""


def compute_permutation_p(
    left: int, right: int, statistic: Statistic, allowance: float = 0.0
) -> float:
    """Return the two-sided p of a difference between groups: twice the smaller tail, at most 1.

    If rows were assigned to the groups at random, p is at most alpha in at most a share alpha of
    cases, whatever the statistic and the sizes.

    The first group has the rows 0 to left - 1, the second group the `right` rows after them.
    `statistic` takes many permutations at once. `allowance` is how much of the observed value may
    come from luck that permutations share out, negative if the second group had it. It brings the
    observed value closer to the middle of the permutations, never beyond.

    Source: Phipson and Smyth 2010, Permutation p-values should never be zero.
    """
    if left == 0 or right == 0:
        return 1.0
    rows = np.tile(np.arange(left + right), (PERMUTATIONS + 1, 1))
    rows[1:] = np.random.default_rng(0).permuted(rows[1:], axis=1)
    values = statistic(rows)
    lead = values[0] - np.median(values)
    if lead * allowance > 0:
        values[0] -= math.copysign(min(abs(lead), abs(allowance)), lead)
    # Equal up to rounding is equal: sums in another order differ in the last bits.
    close = ROUNDING * np.abs(values).max()
    above, below = (values >= values[0] - close).mean(), (values <= values[0] + close).mean()
    return float(min(1.0, 2 * min(above, below)))


def compute_smallest_p(left: int, right: int) -> float:
    """Return the smallest p that groups of these sizes can have; 1 if one of them is empty."""
    if left == 0 or right == 0:
        return 1.0
    ways = np.prod([(right + i) / i for i in range(1, left + 1)])
    return float(min(1.0, max(2 / ways, 2 / (PERMUTATIONS + 1))))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, so that the chance of any false one stays at alpha.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values, kind="stable")
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[int(index)] = highest
    return corrected


def draw_resamples(
    left: int, right: int, size: int | None = None
) -> Iterator[tuple[Indices, Indices]]:
    """Draw `RESAMPLES` pairs of rows with replacement, each group's rows counted from 0.

    Each group has at least one row. `size` rows are drawn of each; None draws as many as it has.
    """
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield rng.integers(left, size=size or left), rng.integers(right, size=size or right)


def compute_interval(values: Sequence[float] | Floats) -> Interval:
    """Return the middle `LEVEL` of values, without NaN; of no values the whole line.

    Values may be infinite: the ends are observed values, not interpolated ones.
    """
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[~np.isnan(numbers)]
    if not numbers.size:
        return Interval(-np.inf, np.inf)
    tail = (1 - LEVEL) / 2
    return Interval(
        float(np.quantile(numbers, tail, method="lower")),
        float(np.quantile(numbers, 1 - tail, method="higher")),
    )


def rank_values(values: Floats) -> Floats:
    """Return ranks from 1, `float[T]`; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
