"""Tests and intervals without a model of the noise: permutations, the bootstrap, and Holm's rule.

The unit is a configuration: what is dealt out anew, or drawn again, is a whole configuration with
all its seeds. Everything is seeded, so the same input always gives the same answer.
"""

from __future__ import annotations

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
"""Deals `[D, rows]` of rows, the first group's first -> `[D]`, larger where that group is ahead."""


def permutation_p(left: int, right: int, statistic: Statistic) -> float:
    """Two-sided p of a difference between two groups: twice the smaller tail, at most 1.

    Under the hypothesis that rows were dealt out to the groups at random, a p of at most alpha
    comes up in at most a share alpha of cases, whatever the statistic and the sizes.

    Args:
        left: rows of the first group, which are 0 to left - 1.
        right: rows of the second one, which follow.
        statistic: of many deals at once.

    Source: Phipson and Smyth 2010, Permutation p-values should never be zero.
    """
    if left == 0 or right == 0:
        return 1.0
    rows = np.tile(np.arange(left + right), (PERMUTATIONS + 1, 1))
    rows[1:] = np.random.default_rng(0).permuted(rows[1:], axis=1)
    values = statistic(rows)
    # Equal up to rounding is equal: sums in another order differ in the last bits.
    close = ROUNDING * np.abs(values).max()
    above, below = (values >= values[0] - close).mean(), (values <= values[0] + close).mean()
    return float(min(1.0, 2 * min(above, below)))


def smallest_p(left: int, right: int) -> float:
    """The smallest p that groups of these sizes can have at all; 1 if one of them is empty."""
    if left == 0 or right == 0:
        return 1.0
    ways = np.prod([(right + i) / i for i in range(1, left + 1)])
    return float(min(1.0, max(2 / ways, 2 / (PERMUTATIONS + 1))))


def holm(p_values: Sequence[float]) -> list[float]:
    """The same p-values corrected for being several: the chance that any is wrong stays at alpha.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values, kind="stable")
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[int(index)] = highest
    return corrected


def drawn_again(
    left: int, right: int, size: int | None = None
) -> Iterator[tuple[Indices, Indices]]:
    """`RESAMPLES` pairs of rows drawn with replacement, each group's rows counted from 0.

    Args:
        left: rows of the first group, at least one.
        right: of the second one.
        size: rows to draw of each; default: as many as there are.
    """
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield rng.integers(left, size=size or left), rng.integers(right, size=size or right)


def middle(values: Sequence[float] | Floats) -> Interval:
    """The middle `LEVEL` of values that may be infinite; NaN is left out; none: all of the line."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return Interval(-np.inf, np.inf)
    tail = (1 - LEVEL) / 2
    # Observed values, since nothing lies between a number and infinity.
    return Interval(
        float(np.quantile(known, tail, method="lower")),
        float(np.quantile(known, 1 - tail, method="higher")),
    )
