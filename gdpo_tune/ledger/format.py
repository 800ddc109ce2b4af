"""How trials are written in the study, and how they are read back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from gdpo_tune.core.object_store import joined
from gdpo_tune.core.trials import Cost, Estimate, Exploit, Outcome, Params, State, TrialRecord
from gdpo_tune.ledger.cost_metrics import with_costs
from gdpo_tune.ledger.rung_records import estimates, pairs, rungs_of
from gdpo_tune.spec import Choice, Constraint, SweepSpec, Uniform

STATES: Mapping[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def trial_directory(sweep: Path, number: int) -> Path:
    """A trial's own folder in the sweep's."""
    return sweep / "trials" / str(number)


def to_record(
    trial: FrozenTrial, spec: SweepSpec, sweep: Path, lineage: tuple[Exploit, ...] = ()
) -> TrialRecord:
    """A trial of the study as the other rooms know it; a checkpoint that is gone is None."""
    about = trial.user_attrs["trial"]
    outcome = trial.user_attrs.get("outcome", {})
    end = trial.user_attrs.get("end", {})
    rungs = rungs_of(trial, spec)
    pause: Mapping[str, Any] = trial.user_attrs.get("pause", {"at": 0, "waits": False})
    waits = trial.state == TrialState.RUNNING and pause["waits"]
    measured = {"cost": vars(rungs[-1].cost)} if rungs else {}
    cost = Cost(**(outcome or end or measured).get("cost", {}))
    splits = {
        split: with_costs(estimates(outcome[split]), cost, spec) if outcome else {}
        for split in ("validation", "test")
    }
    checkpoint = sweep / outcome["checkpoint"] if outcome.get("checkpoint") else None
    return TrialRecord(
        number=trial.number,
        role=about["role"],
        state="paused" if waits else STATES[trial.state],
        params=complete(spec, about["params"]),
        seed=about["seed"],
        proposer=about["proposer"],
        replicate_of=about["replicate_of"],
        **splits,
        feasible=is_feasible(spec, splits["validation"]) if outcome else None,
        rungs=rungs,
        paused_at=pause["at"],
        cost=cost,
        reason=end.get("reason", ""),
        lineage=lineage,
        directory=trial_directory(sweep, trial.number),
        checkpoint=checkpoint if checkpoint is not None and checkpoint.is_dir() else None,
        address=spec.address and joined(spec.address, "trials", str(trial.number)),
        started=trial.datetime_start.timestamp() if trial.datetime_start else None,
        finished=trial.datetime_complete.timestamp() if trial.datetime_complete else None,
        environment=outcome.get("environment", {}),
    )


def complete(spec: SweepSpec, params: Params) -> Params:
    """The parameters of a trial with those that did not exist yet when it was run."""
    later = spec.space.later_defaults
    return params if later.keys() <= params.keys() else {**later, **params}


def is_feasible(spec: SweepSpec, validation: Mapping[str, Estimate]) -> bool:
    """Whether every constraint holds on validation; one on what was not measured does not."""
    return all(
        name in validation and bound.holds(validation[name].mean)
        for name, bound in spec.constraints.items()
    )


def running(spec: SweepSpec, params: Params, about: Mapping[str, Any]) -> FrozenTrial:
    """A trial that begins, for the study; `about` is what is kept of it beside its parameters."""
    domains = distributions(spec, params)
    return create_trial(
        state=TrialState.RUNNING,
        params={name: params[name] for name in domains},
        distributions=domains,
        user_attrs={"trial": about},
    )


def distributions(spec: SweepSpec, params: Params) -> dict[str, BaseDistribution]:
    """Distributions of the searched parameters that are active and inside of their domain."""
    active = spec.space.active(params)
    return {
        name: distribution(domain)
        for name, domain in spec.space.searched.items()
        if name in active and domain.contains(params[name])
    }


def distribution(domain: Choice | Uniform) -> BaseDistribution:
    """Optuna's word for a domain."""
    if isinstance(domain, Choice):
        return CategoricalDistribution(domain.choices)
    if domain.integer:
        return IntDistribution(
            int(domain.low), int(domain.high), log=domain.log, step=int(domain.step or 1)
        )
    return FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)


def excess(bound: Constraint, value: float) -> float:
    """By how much `value` breaks a bound; 0 or less where it holds, as Optuna wants it."""
    return bound.bound - value if bound.op == ">=" else value - bound.bound


def encode(outcome: Outcome, directory: Path) -> dict[str, Any]:
    """An outcome as JSON, paths relative to the sweep's folder so that it can be moved."""
    checkpoint = outcome.checkpoint
    return {
        "validation": pairs(outcome.validation),
        "test": pairs(outcome.test),
        "cost": vars(outcome.cost),
        "checkpoint": os.path.relpath(checkpoint, directory) if checkpoint else None,
        "environment": dict(outcome.environment),
    }
