"""The step metrics of a trial: which of them are worth a point in MLflow."""

from __future__ import annotations

from gdpo_tune.settings import TrainingSettings
from gdpo_tune.steps import is_kept
from gdpo_tune.tracking.projection import finite
from gdpo_tune.trials import Measurement


def curve_values(measurement: Measurement, training: TrainingSettings) -> dict[str, float]:
    """The step metrics of a measurement that are worth a point, by the rule of `steps.is_kept`.

    Which steps are kept follows from the settings alone, so that a trial that goes on after an
    interruption keeps the same ones.
    """
    step, last = measurement.step, training.steps
    kept = ("train/",) if is_kept(step, last) else ()
    evaluation = -(-step // training.evaluate_every)
    if is_kept(evaluation, -(-last // training.evaluate_every)):
        kept = (*kept, "validation/")
    return finite({k: v for k, v in measurement.metrics.items() if kept and k.startswith(kept)})
