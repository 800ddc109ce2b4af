"""Held-out metrics: how a task describes them, and the costs of every trial."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gdpo_tune.core.trials import CLEAR, Cost, Direction, Estimate

HOUR = 3600.0


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


def estimate_mean(
    mean: float, spread: float, prompts: int, lowest: float, highest: float
) -> Estimate:
    """Build the estimate of a metric from its mean over prompts; it never lacks a width.

    Its error and interval are Wilson's, for any values: z^2 prompts are added, half of them with
    the `lowest` value of a completion, half with the `highest`. Where these are equal, all from 0
    to 1 were possible. Close to an end Wilson's interval is too short. Its limit there is at most
    the 5 % quantile of a Poisson rate after (gap / spread)^2 events. `spread` is the standard error
    of `mean`, clustered by prompt.

    Source: Brown, Cai and DasGupta 2001, Interval estimation for a binomial proportion, section
    4.1; Fay and Feuer 1997 (events of weighted sums).
    """
    from scipy.special import gammaincinv  # not for `--help`, which needs costs alone

    is_constant = lowest == highest
    if is_constant:
        spread, lowest, highest = 0.0, min(0.0, mean), max(1.0, mean)
    added = CLEAR**2 / (prompts + CLEAR**2)
    centre = mean + added * ((lowest + highest) / 2 - mean)
    reach = math.hypot(CLEAR * spread * (1 - added), added * (highest - lowest) / 2)
    gaps = mean - lowest, highest - mean
    if spread:
        gaps = [spread**2 / gap * float(gammaincinv((gap / spread) ** 2, 0.05)) for gap in gaps]
    low, high = min(centre - reach, lowest + gaps[0]), max(centre + reach, highest - gaps[1])
    return Estimate(mean, reach / CLEAR, low, high, is_constant)


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
