"""Uncertainty of a front, given standard errors: its members, and its hypervolume.

Both results use draws of each mean plus normal noise with its standard error, independent of the
others. Where all errors come from one spread between seeds, `df` are its degrees of freedom; 0: the
errors are known. Shapes: T points, M objectives; means and errors are `[T, M]` and finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import moocore
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtri, ndtri, stdtrit

from gdpo_tune.analysis.pareto import (
    Floats,
    compute_hypervolume,
    compute_loss_hypervolume,
    compute_losses,
)
from gdpo_tune.core.text import format_percent
from gdpo_tune.core.trials import Objective

DRAWS = 1000
"""Gives a probability a standard error of at most .016."""
PAIRS = 300
"""Pairs of draws; they give a standard deviation to within 4 %."""
HOPELESS = 6.0
"""Standard errors by which a point trails another in every objective to be left out."""
LEVEL = 0.95
"""Nominal coverage of every interval."""


class Interval(NamedTuple):
    """An interval of a quantity at the level `LEVEL`."""

    low: float
    high: float


@cache
def compute_quantile(df: int, comparisons: int = 1) -> float:
    """Return how many errors intervals reach to each side, so that all `comparisons` hold.

    Source: Student's t; Stoline and Ury 1979, The studentized maximum modulus distribution.
    """
    if comparisons == 1:
        return float(stdtrit(df or np.inf, (1 + LEVEL) / 2))
    levels = (np.arange(300) + 0.5) / 300
    largest = ndtri((1 + levels ** (1 / comparisons)) / 2)
    spreads = np.sqrt(chdtri(df, levels) / df) if df else np.ones(1)
    return float(np.quantile(largest[:, None] / spreads, LEVEL))


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


def format_share(share: float, interval: Interval) -> str:
    """Return `12 % (95 %: 5 % to 20 %)`."""
    low, high = format_percent(interval.low), format_percent(interval.high)
    return f"{format_percent(share)} (95 %: {low} to {high})"


def rank_values(values: Floats) -> Floats:
    """Return ranks from 1, `float[T]`; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def estimate_front_probability(
    means: ArrayLike,
    errors: ArrayLike,
    objectives: Sequence[Objective],
    draws: int = DRAWS,
    df: int = 0,
) -> Floats:
    """Estimate each point's probability to be non-dominated, `float[T]`, by seeded Monte Carlo."""
    kept, points, spread = _keep_hopeful(means, errors, objectives, df)
    result = np.zeros(len(kept))
    for drawn in draw_points(points, spread, draws, df=df):
        result[kept] += moocore.is_nondominated(drawn, keep_weakly=True)
    return result / draws


def estimate_optimism(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], draws: int = PAIRS
) -> float:
    """Estimate how far the hypervolume of a front that is claimed on noisy means is too high.

    The luckiest points become members of a front. Drawing once more from the means y, with noise z
    of their errors, adds about the same luck again: what a draw claims above what its members F
    have in y, the truth of the draws,

        mean of H(y + z) - H(y of F(y + z)),        H the hypervolume

    Source: Davison and Hinkley 1997, Bootstrap methods and their application, section 2.1.
    """
    _, points, spread = _keep_hopeful(means, errors, objectives)
    optimism: list[float] = []
    for drawn in draw_points(points, spread, draws):
        members = moocore.is_nondominated(drawn, keep_weakly=True)
        claimed = compute_loss_hypervolume(drawn[members], objectives)
        optimism.append(claimed - compute_loss_hypervolume(points[members], objectives))
    return float(np.mean(optimism)) if optimism else 0.0


def estimate_hypervolume_interval(
    means: ArrayLike,
    errors: ArrayLike,
    objectives: Sequence[Objective],
    draws: int = PAIRS,
    df: int = 0,
) -> Interval:
    """Estimate the interval of the true hypervolume of a front that is claimed on noisy means.

    The middle is H(y) - optimism, with y and it as in `estimate_optimism`. It varies with y more
    than H does, because the optimism varies too. To first order it is 2 H(y) - E H(y + z), so its
    variance is that of the same formula over the draws, where the inner mean is over a second noise
    z' and its mirror image:

        s = sd of 2 H(y + z) - [H(y + z + z') + H(y + z - z')] / 2

    The interval reaches `compute_quantile` times s to both sides, not below 0, and is widened to
    hold H(y). The constraints that a point meets are taken as known. No points give 0 to 0.
    `benchmarks/candidates.py` measures its coverage.

    Source: Davison and Hinkley 1997, section 3.9 (draws of draws).
    """
    seen = compute_hypervolume(means, objectives)
    middle = seen - estimate_optimism(means, errors, objectives, draws)
    _, points, spread = _keep_hopeful(means, errors, objectives)
    noises = draw_points(np.zeros_like(points), spread, draws, seed=1)
    estimates: list[float] = []
    for drawn, noise in zip(draw_points(points, spread, draws), noises, strict=True):
        volume, above, below = (
            compute_loss_hypervolume(values, objectives)
            for values in (drawn, drawn + noise, drawn - noise)
        )
        estimates.append(2 * volume - (above + below) / 2)
    reach = compute_quantile(df) * float(np.std(estimates or [0.0]))
    return Interval(low=max(0.0, min(seen, middle - reach)), high=max(seen, middle + reach))


def draw_points(
    points: Floats, spread: Floats, draws: int, seed: int = 0, df: int = 0
) -> Iterator[Floats]:
    """Yield the points with seeded noise, `draws` times; nothing for no points."""
    if len(points) == 0:
        return
    rng = np.random.default_rng(seed)
    for _ in range(draws):  # one at a time: all of them would be hundreds of MiB
        noise = spread * rng.standard_normal(points.shape)
        yield points + (noise * np.sqrt(df / rng.chisquare(df)) if df else noise)


def _keep_hopeful(
    means: ArrayLike, errors: ArrayLike, objectives: Sequence[Objective], df: int = 0
) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Return which points are kept, `bool[T]`, and their losses and errors.

    A member of the front beats the others by `HOPELESS` in every objective. Leaving them out keeps
    a thousand trials cheap: the member dominates whatever they dominate.
    """
    points = compute_losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    kept = np.ones(len(points), dtype=np.bool_)
    front = moocore.is_nondominated(points, keep_weakly=True) if len(points) else kept
    reach = HOPELESS * compute_quantile(df) / compute_quantile(0)
    for rival, rival_spread in zip(points[front], spread[front], strict=True):
        margin = reach * np.hypot(spread, rival_spread)
        kept &= ~(points - rival > margin).all(axis=1)
    return kept, points[kept], spread[kept]
