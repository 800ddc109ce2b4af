"""What a trial has cost, as metrics that objectives and constraints may name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gdpo_tune.core.trials import Cost, Estimate

HOUR = 3600.0


def gpu_hours(cost: Cost, gpus: float) -> float:
    """Wall time of a trial times its GPUs, in hours."""
    return cost.seconds * gpus / HOUR


def priced(
    measured: Mapping[str, Estimate], cost: Cost, names: Collection[str], gpus: float
) -> dict[str, Estimate]:
    """Held-out metrics and, of `metrics.COST_METRICS`, those that are asked for.

    A cost is known exactly, so its standard error within a trial is 0. A metric that the task
    itself measures under such a name stays as it is.

    Args:
        measured: metric -> estimate.
        cost: what had been spent by then.
        names: metrics that objectives and constraints name.
        gpus: of the trial.
    """
    known = {
        "seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "gpu_hours": gpu_hours(cost, gpus),
    }
    asked = {name: Estimate(value, 0.0) for name, value in known.items() if name in names}
    return {**asked, **measured}
