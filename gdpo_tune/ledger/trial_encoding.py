"""Encode trials, rungs and outcomes as the JSON that the study holds, and decode them.

Costs that an objective or a constraint names are stored among the metrics, because a later start
may give a trial other resources. Missing ones are added on reading, because a later start may name
a cost that the sweep did not name when the trial ran.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from gdpo_tune.core.content import format_time
from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.metrics import add_costs
from gdpo_tune.core.object_store import join_address
from gdpo_tune.core.text import format_list
from gdpo_tune.core.trial_files import TRIALS
from gdpo_tune.core.trials import (
    CHECKPOINT_PREFIX,
    Cost,
    Estimate,
    Measurement,
    Outcome,
    Params,
    Part,
    Rung,
    State,
    TrialRecord,
)
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.space import Choices, Uniform

STATES: Mapping[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
RUNG = "rung:"
"""Prefix of a rung's attribute, before its number of completions."""
TEST = "test/"
"""Prefix of an attribute that repeats a mean on test prompts for people; older ledgers lack it."""


def decode_trial(
    trial: FrozenTrial, spec: SweepSpec, sweep: Path, contents: Sequence[Mapping[str, Any]] = ()
) -> TrialRecord:
    """Return a trial of the study as a record; a checkpoint that does not exist is None.

    `contents` are those of `Ledger.get_contents`.

    Raises:
        KeyError, TypeError: another version wrote the trial.
    """
    stored = trial.user_attrs["trial"]
    outcome = trial.user_attrs.get("outcome", {})
    end = trial.user_attrs.get("end", {})
    pause: Mapping[str, Any] = trial.user_attrs.get("pause", {"at": 0, "waits": False})
    state = STATES[trial.state]
    attributes = trial.user_attrs.items()
    decoded = (decode_rung(value, spec) for key, value in attributes if key.startswith(RUNG))
    rungs = tuple(sorted(decoded, key=lambda rung: rung.step))
    measured = {"cost": vars(rungs[-1].cost)} if rungs else {}
    cost = Cost(**(outcome or end or measured).get("cost", {}))
    splits = {
        split: add_judged_costs(decode_estimates(outcome[split]), cost, spec) if outcome else {}
        for split in ("validation", "test")
    }
    # A merge that was stopped has been judged by its rung.
    judged = splits["validation"] or (rungs[-1].validation if rungs and "parts" in stored else {})
    means = {name: estimate.mean for name, estimate in judged.items()}
    names = TRIALS, str(trial.number)
    directory = sweep.joinpath(*names)
    checkpoint = sweep / outcome["checkpoint"] if outcome.get("checkpoint") else None
    steps = (rung.step for rung in rungs[:-1]) if outcome else ()
    return TrialRecord(
        number=trial.number,
        role=stored["role"],
        state="paused" if state == "running" and pause["waits"] else state,
        params=spec.space.align(stored["params"]),
        seed=stored["seed"],
        proposer=stored["proposer"],
        replicate_of=stored["replicate_of"],
        **splits,
        feasible=spec.meets_constraints(means) if outcome or means else None,
        rungs=rungs,
        paused_at=pause["at"],
        ends_at=pause.get("ends_at"),
        cost=cost,
        reason=end.get("reason") or pause.get("why", ""),
        directory=directory,
        checkpoint=checkpoint if checkpoint and checkpoint.is_dir() else None,
        address=join_address(spec.address, *names) if spec.address else "",
        started=trial.datetime_start.timestamp() if trial.datetime_start else None,
        finished=trial.datetime_complete.timestamp() if trial.datetime_complete else None,
        environment=outcome.get("environment", {}),
        parts=tuple(Part(*part) for part in stored.get("parts", ())),
        request=stored.get("request", ""),
        content=_describe_content(trial.number, contents[1:]),
        kept_steps=tuple(n for n in steps if (directory / f"{CHECKPOINT_PREFIX}{n}").is_dir()),
    )


def _describe_content(number: int, changes: Sequence[Mapping[str, Any]]) -> str:
    """Return `after mine.py changed (2026-11-25 12:00:00)`; empty if nothing changed."""
    return ", ".join(
        f"{'after' if number >= change['first'] else 'before'} "
        f"{format_list(change['changes'])} changed ({format_time(change['time'])})"
        for change in changes
    )


def create_running_trial(
    spec: SweepSpec, params: Params, attributes: Mapping[str, Any]
) -> FrozenTrial:
    """Return a new trial for the study, with attributes that are stored as JSON."""
    active = spec.space.select_active(params)
    distributions: dict[str, BaseDistribution] = {
        name: convert_to_distribution(domain)
        for name, domain in spec.space.searched_domains.items()
        if name in active and name in params and domain.contains(params[name])
    }
    return create_trial(
        state=TrialState.RUNNING,
        params={name: params[name] for name in distributions},
        distributions=distributions,
        user_attrs={"trial": attributes},
    )


def convert_to_distribution(domain: Choices | Uniform) -> BaseDistribution:
    """Return a domain as an Optuna distribution."""
    if isinstance(domain, Choices):
        return CategoricalDistribution(domain.choices)
    if domain.integer:
        return IntDistribution(
            int(domain.low), int(domain.high), log=domain.log, step=int(domain.step or 1)
        )
    high = max((domain.high, *domain.grid))  # Optuna would drop a last value beyond the end
    return FloatDistribution(domain.low, high, log=domain.log, step=domain.step)


def encode_outcome(outcome: Outcome, directory: Path) -> dict[str, Any]:
    """Return an outcome as JSON, with paths relative to a directory that may move."""
    checkpoint = outcome.checkpoint
    return {
        "validation": encode_estimates(outcome.validation),
        "test": encode_estimates(outcome.test),
        "cost": vars(outcome.cost),
        "checkpoint": os.path.relpath(checkpoint, directory) if checkpoint else None,
        "environment": dict(outcome.environment),
    }


def encode_rung(measurement: Measurement, spec: SweepSpec) -> dict[str, Any]:
    """Return a measurement on validation prompts, and the costs that are judged, as JSON.

    Raises:
        NonFiniteError: a value is NaN or infinite, so it cannot be compared.
    """
    step, cost = measurement.step, measurement.cost
    for name, estimate in measurement.validation.items():
        if not math.isfinite(estimate.mean):
            raise NonFiniteError(f"validation {name} is {estimate.mean} at step {step}")
    return {
        "step": step,
        "validation": encode_estimates(add_judged_costs(measurement.validation, cost, spec)),
        "cost": vars(cost),
        "time": time.time(),
    }


def decode_rung(stored: Mapping[str, Any], spec: SweepSpec) -> Rung:
    """Return a rung from JSON."""
    cost = Cost(**stored["cost"])
    estimates = decode_estimates(stored["validation"])
    validation = add_judged_costs(estimates, cost, spec)
    return Rung(stored["step"], validation, cost, stored["time"])


def encode_estimates(estimates: Mapping[str, Estimate]) -> dict[str, list[float]]:
    """Return estimates as JSON: mean, standard error, interval and `is_constant` of each metric."""
    return {n: [e.mean, e.se, e.low, e.high, e.is_constant] for n, e in estimates.items()}


def decode_estimates(stored: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return estimates from JSON."""
    return {name: Estimate(*values) for name, values in stored.items()}


def add_judged_costs(
    measured: Mapping[str, Estimate], cost: Cost, spec: SweepSpec
) -> dict[str, Estimate]:
    """Return metrics with the costs that objectives or constraints name; present ones stay."""
    return add_costs(measured, cost, spec.required_metrics, spec.resources.total_gpus)
