"""The step metrics of a trial: which of them are worth a point in MLflow."""

from __future__ import annotations

from gdpo_tune.tracking.projection import finite
from gdpo_tune.trials import Measurement, TrainingSettings

CURVE_POINTS = 60
"""Most points of one step metric of one trial: a thousand trials of thousands of steps would
otherwise fill the database with tens of gigabytes."""


def curve_values(measurement: Measurement, training: TrainingSettings) -> dict[str, float]:
    """The step metrics of a measurement that are worth a point, at most `CURVE_POINTS` a trial.

    Which steps are kept follows from the settings alone, so that a trial that goes on after an
    interruption keeps the same ones.
    """
    step, last = measurement.step, training.steps
    kept = ("train/",) if _is_kept(step, last) else ()
    evaluation = -(-step // training.evaluate_every)
    if _is_kept(evaluation, -(-last // training.evaluate_every)):
        kept = (*kept, "validation/")
    return finite({k: v for k, v in measurement.metrics.items() if kept and k.startswith(kept)})


def _is_kept(index: int, last: int) -> bool:
    """Whether point `index` of 1..`last` is among the at most `CURVE_POINTS` to be sent."""
    stride = -(-last // CURVE_POINTS)
    return index >= last or index % stride == 0
