"""Held-out metrics: how a task describes them, and the costs of every trial."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gdpo_tune.core.trials import Cost, Direction, Estimate

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
