"""Held-out metrics: how a task describes them, their estimates, and the costs of every trial.

Estimates have standard errors that are clustered by prompt, and intervals.

Shapes: P prompts, S completions of one prompt, M metrics.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gdpo_tune.core.trials import Z_95, Cost, Direction, Estimate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HOUR = 3600.0
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Condition:
    """A limit of a metric, as a person writes it: `length >= 0.6`."""

    metric: str
    op: str
    """Key of `COMPARISONS`."""
    limit: float
    position: int = field(default=1, compare=False)
    """Of the metric in the text, from 1, for messages."""

    @property
    def is_floor(self) -> bool:
        """True for a lower limit."""
        return self.op[0] == ">"

    def holds(self, value: float) -> bool:
        """Return whether `value` satisfies the condition; NaN does not."""
        return COMPARISONS[self.op](value, self.limit)

    def compute_shortfall(self, value: float) -> float:
        """Return the distance of `value` to the limit; 0 beyond the limit, infinite for NaN."""
        gap = self.limit - value if self.is_floor else value - self.limit
        return math.inf if math.isnan(gap) else max(gap, 0.0)

    def __str__(self) -> str:
        limit = f"{self.limit:g}" if float(f"{self.limit:g}") == self.limit else repr(self.limit)
        return f"{self.metric} {self.op} {limit}"


@dataclass(frozen=True)
class MetricInfo:
    """A metric that objectives and constraints may name."""

    direction: Direction
    low: float
    high: float
    doc: str


COST_METRICS = {
    "seconds": MetricInfo("minimize", 0, float("inf"), "wall time of the trial"),
    "cpu_seconds": MetricInfo("minimize", 0, float("inf"), "CPU time of the trial"),
    "gpu_hours": MetricInfo("minimize", 0, float("inf"), "wall time times the GPUs of the trial"),
}
"""Costs of a trial, whatever its task: objectives and constraints may name these too."""


def count_gpu_hours(cost: Cost, gpus: float) -> float:
    """Return a trial's wall time multiplied by its GPUs, in hours."""
    return cost.seconds * gpus / HOUR


def add_costs(
    measured: Mapping[str, Estimate], cost: Cost, names: Collection[str], gpus: float
) -> dict[str, Estimate]:
    """Add to held-out metrics those of `COST_METRICS` that are named.

    A cost is known exactly, so its standard error within a trial is 0. A metric that the task
    itself measures under such a name stays as it is. `gpus` are those of the trial.
    """
    costs = {
        "seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "gpu_hours": count_gpu_hours(cost, gpus),
    }
    named = {name: Estimate(value, 0.0) for name, value in costs.items() if name in names}
    return {**named, **measured}


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
    import numpy as np

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
    """Build the estimate of a metric from its mean over prompts; its interval always has a width.

    Error and interval are Wilson's, for values of any range: as if z^2 more prompts had been seen,
    half of them with the `lowest` value of a completion, half with the `highest`. If all values are
    equal, 0 and 1 stand for these. Near an end of the range Wilson's interval is too short there,
    so its limit is then that of Poisson events: with g = `mean` - `lowest`, it is at most
    `lowest` + spread^2 / g x (the lower limit of (g / spread)^2 events), likewise at the other end.
    `spread` is the standard error of `mean`, clustered by prompt.

    Source: Brown, Cai and DasGupta 2001, Interval estimation for a binomial proportion; Fay and
    Feuer 1997 (limits of weighted Poisson events).
    """
    from scipy.special import gammaincinv  # late, as numpy: names of metrics are read without it

    is_constant = math.isclose(lowest, highest)
    if is_constant:
        spread, lowest, highest = 0.0, min(0.0, mean), max(1.0, mean)
    added = Z_95**2 / (prompts + Z_95**2)
    centre = mean + added * ((lowest + highest) / 2 - mean)
    reach = math.hypot(Z_95 * spread * (1 - added), added * (highest - lowest) / 2)
    gaps = [mean - lowest, highest - mean]
    if spread:
        gaps = [spread**2 / gap * float(gammaincinv((gap / spread) ** 2, 0.025)) for gap in gaps]
    low, high = min(centre - reach, lowest + gaps[0]), max(centre + reach, highest - gaps[1])
    return Estimate(mean, reach / Z_95, low, high, is_constant)
