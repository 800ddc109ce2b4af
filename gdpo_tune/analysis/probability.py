"""Uncertainty of a front, given standard errors: its members, and its hypervolume.

Both results use the same draws: each mean plus normal noise with its standard error, independent of
the others. Shapes: T points, M objectives; means and errors are `[T, M]` and finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import moocore
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.analysis.pareto import (
    Floats,
    compute_hypervolume,
    compute_loss_hypervolume,
    compute_losses,
)
from gdpo_tune.core.trials import Objective

DRAWS = 1000
"""Gives a probability a standard error of at most .016."""
HOPELESS = 6.0
"""Standard errors by which a point trails another in every objective to be left out."""
LEVEL = 0.95
"""Nominal coverage of every interval."""


@dataclass(frozen=True)
class Interval:
    """An interval of a quantity at the level `LEVEL`."""

    low: float
    high: float


def estimate_front_probability(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], draws: int = DRAWS
) -> Floats:
    """Estimate each point's probability to be non-dominated, `float[T]`, by seeded Monte Carlo.

    Raises:
        ValueError: `means` is not empty and does not have one column for each objective.
    """
    points = compute_losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    result = np.zeros(len(points))
    kept = np.flatnonzero(~_mark_hopeless(points, spread))
    for drawn in draw_points(points[kept], spread[kept], draws):
        result[kept] += moocore.is_nondominated(drawn, keep_weakly=True)
    return result / draws


def estimate_hypervolume_interval(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], draws: int = DRAWS
) -> Interval:
    """Estimate the interval of the true hypervolume of points that are measured with errors.

    With H the hypervolume of the means and q(p) the quantile p of the hypervolume over the draws,
    the basic (reverse percentile) bootstrap interval:

        [ 2 H - q(0.975),  2 H - q(0.025) ],  not below 0, and widened to hold H

    Noise makes a front look better than it is, because the luckiest of several points leads it.
    Drawing once more from noisy means adds about the same bias again. So the draws lie above H as H
    lies above the truth, and the interval corrects for this; plain quantiles would be too high.

    The constraints that a point meets are taken as known. No points give 0 to 0.

    Source: Davison and Hinkley 1997, Bootstrap methods and their application, section 5.2.

    Raises:
        ValueError: `means` is not empty and does not have one column for each objective.
    """
    points = compute_losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    seen = compute_hypervolume(means, objectives)
    kept = ~_mark_hopeless(points, spread)
    volumes = [
        compute_loss_hypervolume(drawn, objectives)
        for drawn in draw_points(points[kept], spread[kept], draws)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(volumes, [tail, 1 - tail]) if volumes else (0.0, 0.0)
    return Interval(
        low=max(0.0, min(seen, 2 * seen - float(high))),
        high=max(seen, 2 * seen - float(low)),
    )


def draw_points(points: Floats, spread: Floats, draws: int) -> Iterator[Floats]:
    """Yield the points with seeded noise, `draws` times; nothing for no points."""
    if len(points) == 0:
        return
    rng = np.random.default_rng(0)
    for _ in range(draws):  # one at a time: all of them would be hundreds of MiB
        yield points + spread * rng.standard_normal(points.shape)


def _mark_hopeless(points: Floats, spread: Floats) -> NDArray[np.bool_]:
    """Mark the points that a member of the front beats by `HOPELESS` in every objective, `bool[T]`.

    Leaving them out keeps a thousand trials cheap and changes no probability visibly: the member
    dominates whatever such a point would dominate.
    """
    result = np.zeros(len(points), dtype=np.bool_)
    if len(points) == 0:
        return result
    front = moocore.is_nondominated(points, keep_weakly=True)
    for rival, rival_spread in zip(points[front], spread[front], strict=True):
        margin = HOPELESS * np.hypot(spread, rival_spread)
        result |= (points - rival > margin).all(axis=1)
    return result
