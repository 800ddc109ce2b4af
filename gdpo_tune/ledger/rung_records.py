"""How what trials measure on the way is written in the study, and how it is read back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Rung
from gdpo_tune.ledger.cost_metrics import with_costs
from gdpo_tune.spec import SweepSpec

RUNG = "rung:"
"""Before the completions of a rung, in the name of its attribute."""


def encode_rung(measurement: Measurement, order: int, spec: SweepSpec) -> dict[str, Any]:
    """A measurement on validation prompts as JSON; `order` counts those of all trials.

    Raises:
        NonFiniteError: a value is not finite, so it could be compared with no other.
    """
    step = measurement.step
    for name, found in measurement.validation.items():
        if not math.isfinite(found.mean):
            raise NonFiniteError(f"validation {name} is {found.mean} at step {step}")
    return {
        "step": step,
        "validation": pairs(with_costs(measurement.validation, measurement.cost, spec)),
        "cost": vars(measurement.cost),
        "order": order,
        "time": time.time(),
    }


def pairs(values: Mapping[str, Estimate]) -> dict[str, list[float]]:
    """Estimates as JSON."""
    return {name: [estimate.mean, estimate.se] for name, estimate in values.items()}


def estimates(stored: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Estimates from JSON."""
    return {name: Estimate(mean, se) for name, (mean, se) in stored.items()}


def rungs_of(trial: FrozenTrial, spec: SweepSpec) -> tuple[Rung, ...]:
    """What a trial has measured, by step."""
    rungs = [to_rung(stored, spec) for stored in stored_rungs(trial)]
    return tuple(sorted(rungs, key=lambda rung: rung.step))


def in_order(trials: Iterable[FrozenTrial], spec: SweepSpec) -> list[tuple[int, Rung]]:
    """Every rung with its trial's number, in the order of their recording.

    Those from before that order was kept come first, by completions and number.
    """
    stored = [(trial.number, rung) for trial in trials for rung in stored_rungs(trial)]
    known = [(rung.get("order", -1), to_rung(rung, spec), number) for number, rung in stored]
    known.sort(key=lambda entry: (entry[0], entry[1].completions, entry[2]))
    return [(number, rung) for _, rung, number in known]


def stored_rungs(trial: FrozenTrial) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [value for key, value in trial.user_attrs.items() if key.startswith(RUNG)]


def to_rung(stored: Mapping[str, Any], spec: SweepSpec) -> Rung:
    """A rung from JSON; one from before standard errors were kept has means alone."""
    if "validation" in stored:
        validation = estimates(stored["validation"])
    else:
        means: Mapping[str, float] = stored["metrics"]
        validation = {
            name.removeprefix("validation/"): Estimate(mean, math.nan)
            for name, mean in means.items()
        }
    cost = Cost(**stored["cost"])
    return Rung(stored["step"], with_costs(validation, cost, spec), cost, stored.get("time"))
