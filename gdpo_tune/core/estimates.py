"""Means of held-out metrics with standard errors, clustered by prompt, and intervals.

Shapes: P prompts, S completions of one prompt, M metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

from gdpo_tune.core.trials import CLEAR, Estimate

RESAMPLES = 1000


def estimate_metrics(
    columns: Mapping[str, Sequence[float | None]], samples_per_prompt: int, seed: int
) -> dict[str, Estimate]:
    """Estimate means of metrics, with errors from a bootstrap over whole prompts.

    Completions of one prompt are alike; resampling them one by one would understate the error.
    `estimate_mean` makes intervals of the errors.

    `columns` maps a metric's name to P * S values, those of one prompt adjacent; None is left out.
    `samples_per_prompt` is S. A metric without a value on two prompts is left out: one prompt says
    nothing about its standard error. It may be one of a kind of task that is rare.
    """
    values = np.array(list(columns.values()), dtype=np.float64)  # None becomes NaN
    values = values.reshape(len(columns), -1, samples_per_prompt)  # [M, P, S]
    answered = (~np.isnan(values)).any(axis=2).sum(axis=1)
    names = [name for name, count in zip(columns, answered, strict=True) if count > 1]
    values, answered = values[answered > 1], answered[answered > 1]
    scored = ~np.isnan(values)
    sums: NDArray[np.float64] = np.where(scored, values, 0.0).sum(axis=2)
    counts: NDArray[np.int64] = scored.sum(axis=2)
    prompts = sums.shape[1]
    # Number of draws of each prompt in each resample: one matrix product serves every metric.
    drawn = np.random.default_rng(seed).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=RESAMPLES
    )
    resampled = counts @ drawn.T
    means = np.where(resampled > 0, sums @ drawn.T / np.maximum(resampled, 1), np.nan)
    errors = np.nan_to_num(np.nanstd(means, axis=1, ddof=1))
    means = sums.sum(axis=1) / counts.sum(axis=1)
    parts = (means, errors, answered, np.nanmin(values, (1, 2)), np.nanmax(values, (1, 2)))
    rows = zip(*(part.tolist() for part in parts), strict=True)
    return {name: estimate_mean(*row) for name, row in zip(names, rows, strict=True)}


def estimate_mean(
    mean: float, spread: float, prompts: int, lowest: float, highest: float
) -> Estimate:
    """Build the estimate of a metric from its mean over prompts; it never lacks a width.

    Its error and interval are Wilson's, for any values: z^2 prompts are added, half of them with
    the `lowest` value of a completion, half with the `highest`. Where these are equal but for
    rounding, all from 0 to 1 were possible. Next to an end Wilson's interval is too short. So it
    leaves at most the share of the gap that is the exact limit of (gap / spread)^2 Poisson events.
    `spread` is the standard error of `mean`, clustered by prompt.

    Source: Brown, Cai and DasGupta 2001, Interval estimation for a binomial proportion; Fay and
    Feuer 1997 (limits of weighted Poisson events).
    """
    is_constant = math.isclose(lowest, highest)
    if is_constant:
        spread, lowest, highest = 0.0, min(0.0, mean), max(1.0, mean)
    added = CLEAR**2 / (prompts + CLEAR**2)
    centre = mean + added * ((lowest + highest) / 2 - mean)
    reach = math.hypot(CLEAR * spread * (1 - added), added * (highest - lowest) / 2)
    gaps = [mean - lowest, highest - mean]
    if spread:
        gaps = [spread**2 / gap * float(gammaincinv((gap / spread) ** 2, 0.025)) for gap in gaps]
    low, high = min(centre - reach, lowest + gaps[0]), max(centre + reach, highest - gaps[1])
    return Estimate(mean, reach / CLEAR, low, high, is_constant)
