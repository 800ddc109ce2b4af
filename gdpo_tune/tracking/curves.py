"""The step metrics of a trial: which of them are worth a point in MLflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gdpo_tune.core.events import TrialProgress
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.steps import is_kept
from gdpo_tune.core.trials import Measurement
from gdpo_tune.tracking.run_content import finite, milliseconds


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


def curve_points(
    taken: Iterable[tuple[Measurement, int]], after: int, training: TrainingSettings
) -> list[list[Any]]:
    """Points `[name, value, ms, step]` of measurements and their times, beyond step `after`."""
    return [
        [name, value, when, measurement.step]
        for measurement, when in taken
        if measurement.step > after
        for name, value in curve_values(measurement, training).items()
    ]


def dated(progress: TrialProgress, now: int) -> Iterator[tuple[Measurement, int]]:
    """What a trial has just reported, by step, each with the ms since 1970 when it was measured."""
    spent = progress.measurement.cost.seconds
    for earlier in progress.earlier:
        yield earlier, now - milliseconds(spent - earlier.cost.seconds)
    yield progress.measurement, now
