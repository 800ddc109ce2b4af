"""How sure the front is, given standard errors: who is on it, and how much it covers.

Both answers come from the same draws: every mean is drawn anew from a normal distribution with its
standard error, independently of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import moocore
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.analysis.pareto import Floats, hypervolume, loss_hypervolume, losses
from gdpo_tune.core.trials import Objective

DRAWS = 1000
"""Gives a probability a standard error of at most .016."""
HOPELESS = 6.0
"""Standard errors by which a point trails another in every objective to be left out."""
LEVEL = 0.95
"""Share of intervals that are to cover the truth."""


@dataclass(frozen=True)
class Interval:
    """Where a quantity lies, at the level `LEVEL`."""

    low: float
    high: float


def front_probability(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], draws: int = DRAWS
) -> Floats:
    """Probability of each of T points to be non-dominated, `float[T]`, by seeded Monte Carlo.

    Means and standard errors are `[T, M]`. The same input always gives the same answer. Input is
    finite.

    Raises:
        ValueError: `means` is not empty and has not one column for each objective.
    """
    points = losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    result = np.zeros(len(points))
    kept = np.flatnonzero(~_hopeless(points, spread))
    for drawn in _drawn(points[kept], spread[kept], draws):
        result[kept] += moocore.is_nondominated(drawn, keep_weakly=True)
    return result / draws


def hypervolume_interval(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], draws: int = DRAWS
) -> Interval:
    """Where the hypervolume of T points lies, given that their means are measured with errors.

    With H the hypervolume of the means and q(p) the quantile p of the hypervolume over the draws,
    the basic (reverse percentile) bootstrap interval:

        [ 2 H - q(0.975),  2 H - q(0.025) ],  not below 0, and widened to hold H

    Noise makes a front look better than it is, since the luckiest of several points leads it; drawn
    once more from noisy means it looks better again, by about as much. So the draws lie above H as
    H lies above the truth, and the interval lies below H by that much: that is why it is not made
    of the quantiles themselves, which would cover too high values.

    Which points meet the constraints is taken as known. Means and errors are `[T, M]` and finite;
    no points give 0 to 0. The same input always gives the same answer.

    Source: Davison and Hinkley 1997, Bootstrap methods and their application, section 5.2.

    Raises:
        ValueError: `means` is not empty and has not one column for each objective.
    """
    points = losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    known = hypervolume(means, objectives)
    kept = ~_hopeless(points, spread)
    drawn = [
        loss_hypervolume(again, objectives) for again in _drawn(points[kept], spread[kept], draws)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail]) if drawn else (0.0, 0.0)
    return Interval(
        low=max(0.0, min(known, 2 * known - float(high))),
        high=max(known, 2 * known - float(low)),
    )


def _drawn(points: Floats, spread: Floats, draws: int) -> Iterator[Floats]:
    """`draws` times the points with noise, always the same; nothing for no points."""
    if len(points) == 0:
        return
    rng = np.random.default_rng(0)
    for _ in range(draws):  # one at a time: all of them would be hundreds of MiB
        yield points + spread * rng.standard_normal(points.shape)


def _hopeless(points: Floats, spread: Floats) -> NDArray[np.bool_]:
    """Which points one of the front beats beyond doubt in every objective, `bool[T]`.

    Leaving them out keeps a thousand trials cheap and changes no probability visibly: whatever such
    a point would dominate, the one that beats it dominates as well.
    """
    result = np.zeros(len(points), dtype=np.bool_)
    if len(points) == 0:
        return result
    front = moocore.is_nondominated(points, keep_weakly=True)
    for rival, rival_spread in zip(points[front], spread[front], strict=True):
        margin = HOPELESS * np.hypot(spread, rival_spread)
        result |= (points - rival > margin).all(axis=1)
    return result
