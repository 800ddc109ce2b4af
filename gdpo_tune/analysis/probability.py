"""How sure the front is: the probability of each point to be on it, given its standard errors."""

from __future__ import annotations

from collections.abc import Sequence

import moocore
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.analysis.pareto import Floats, losses
from gdpo_tune.trials import Objective

DRAWS = 1000
"""Gives a probability a standard error of at most .016."""
HOPELESS = 6.0
"""Standard errors by which a point trails another in every objective to be left out."""


def front_probability(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], draws: int = DRAWS
) -> Floats:
    """Probability of each of T points to be non-dominated, `float[T]`, by seeded Monte Carlo.

    Every mean `[T, M]` is drawn from a normal distribution with its standard error `[T, M]`,
    independently of the others. The same input always gives the same answer. Input is finite.

    Raises:
        ValueError: `means` is not empty and has not one column for each objective.
    """
    points = losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    result = np.zeros(len(points))
    kept = np.flatnonzero(~_hopeless(points, spread))
    if len(kept) == 0:
        return result
    noise = np.random.default_rng(0).standard_normal((draws, *points[kept].shape))
    for drawn in points[kept] + spread[kept] * noise:
        result[kept] += moocore.is_nondominated(drawn, keep_weakly=True)
    return result / draws


def _hopeless(points: Floats, spread: Floats) -> NDArray[np.bool_]:
    """Which points some other one beats beyond doubt in every objective, `bool[T]`.

    Leaving them out keeps a thousand trials cheap and changes no probability visibly: whatever such
    a point would dominate, the one that beats it dominates as well.
    """
    result = np.zeros(len(points), dtype=np.bool_)
    for rival, rival_spread in zip(points, spread, strict=True):
        margin = HOPELESS * np.hypot(spread, rival_spread)
        result |= (points - rival > margin).all(axis=1)
    return result
