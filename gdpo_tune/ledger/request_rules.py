"""Actions that requests may name: what each checks, and what it changes.

A person's command checks a request with these rules before it leaves it, and the driver checks it
again before it applies it, because the sweep went on meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import RecordedRequest, Request, RequestEffect, Setting
from gdpo_tune.core.text import format_count
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger.budget import compute_spending, describe_spent_budget
from gdpo_tune.ledger.steering_state import (
    BUDGET,
    SteeringState,
    apply_settings,
    fold_requests,
    read_setting,
)
from gdpo_tune.spec import PbtSettings, SweepSpec
from gdpo_tune.spec.load import read_point
from gdpo_tune.spec.model import Budget, Search
from gdpo_tune.spec.text import join_names, suggest

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class SweepSnapshot:
    """A sweep at the moment of a request."""

    file: SweepSpec
    """Specification as its file states it."""
    records: Sequence[TrialRecord]
    requests: Sequence[RecordedRequest]
    hours: float = 0.0
    """Running time of the sweep, in hours."""

    @property
    def spec(self) -> SweepSpec:
        """Specification with the settings that requests have changed."""
        return apply_settings(self.file, self.requests)

    @property
    def state(self) -> SteeringState:
        """State that the recorded requests lead to."""
        return fold_requests(self.requests)

    def find_trial(self, arguments: Arguments) -> TrialRecord:
        """Return the trial that `arguments` name."""
        number = arguments["trial"]
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(f"trial = {number!r}: write the number of a trial, such as 7")
        if not 0 <= number < len(self.records):
            last = f"the last one is {len(self.records) - 1}" if self.records else "there is none"
            raise UsageError(f"there is no trial {number}: {last}")
        return self.records[number]

    def find_author(self, effect: RequestEffect) -> str:
        """Return who has asked for an equal effect before; empty if nobody has."""
        equal = (request.author for request in self.requests if request.effect == effect)
        return next(equal, "")


@dataclass(frozen=True)
class Decision:
    """A request that can be applied."""

    effect: RequestEffect
    text: str
    """Result of the request, in one line for a person."""


def decide_stop(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """End a trial that runs or waits."""
    _check_names(arguments, "trial")
    trial = sweep.find_trial(arguments)
    if not trial.is_open:
        why = f" ({trial.reason})" if trial.reason else ""
        raise UsageError(f"trial {trial.number} has ended already: {trial.state}{why}")
    if trial.number in sweep.state.stopped:
        raise UsageError(f"trial {trial.number} is {sweep.state.stopped[trial.number]} already")
    if any(bound.baseline == trial.role for bound in sweep.spec.constraints.values()):
        raise UsageError(
            f"trial {trial.number} is the baseline {trial.role}, to which constraints refer"
        )
    how = "ends" if trial.state == "paused" else "ends at its next step"
    return Decision(RequestEffect(stop=trial.number), f"trial {trial.number} {how}")


def decide_add(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """Start a trial of a configuration next."""
    _check_names(arguments, "params", "force")
    params = _read_mapping(arguments, "params", "add learning_rate=1e-4")
    force = arguments.get("force") is True
    return _add(sweep, RequestEffect(point=read_point(sweep.spec, params, force=force)))


def decide_clone(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """Start a trial next that differs from an earlier one in some parameters."""
    _check_names(arguments, "trial", "changes", "force")
    trial, force = sweep.find_trial(arguments), arguments.get("force") is True
    if not trial.trained_params:
        raise UsageError(f"trial {trial.number} ({trial.role}) trains nothing that can be cloned")
    changes = _read_mapping(arguments, "changes", f"clone {trial.number} learning_rate=1e-4")
    point = read_point(sweep.spec, changes, trial.trained_params, force=force)
    if all(trial.params[name] == value for name, value in point.items()):
        raise UsageError(f"trial {trial.number} has these values already, so this changes nothing")
    return _add(sweep, RequestEffect(point=point))


def decide_trials(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """Change the number of configurations that the search tries."""
    _check_names(arguments, "number")
    _refuse_population(sweep.spec, "the number of its members is fixed")
    number = arguments["number"]
    started = sum(r.role in ("search", "member") and not r.request for r in sweep.records)
    if isinstance(number, int) and number < started:
        raise UsageError(f"trials = {number}: {started} have started already; write at least that")
    _check_section(Search, "trials", number)
    if number > sweep.spec.search.trials:
        _refuse_spent_budget(sweep)
    return _change(sweep, {"trials": number})


def decide_budget(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """Change limits of the sweep."""
    if not arguments:
        raise UsageError(f"name a limit: {join_names(Budget.model_fields)}")
    spent = compute_spending(sweep.spec, sweep.records, sweep.hours)
    for name, value in arguments.items():
        if name not in Budget.model_fields:
            guess = suggest(name, Budget.model_fields)
            raise UsageError(f"{name}: unknown limit; {guess}use {join_names(Budget.model_fields)}")
        _check_section(Budget, name, value)
        if name == "gpu_hours" and value and not sweep.spec.resources.gpus:
            raise UsageError("gpu_hours: no trial has a GPU, so it would never be spent")
        if value and value < spent[name]:
            raise UsageError(
                f"{name} = {value:,g}: {spent[name]:,.6g} are spent already; write more, or pause"
            )
    return _change(sweep, {f"{BUDGET}{name}": value for name, value in arguments.items()})


def decide_pause(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """Start no further trial."""
    _check_names(arguments)
    if pause := sweep.state.pause:
        raise UsageError(f"the sweep is paused already, by {pause.author}")
    running = sum(record.state == "running" for record in sweep.records)
    ends = f"; {format_count(running, 'running trial')} will end normally" if running else ""
    return Decision(RequestEffect(paused=True), f"no further trial starts{ends}")


def decide_resume(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    """Start trials again."""
    _check_names(arguments)
    if sweep.state.pause is None:
        raise UsageError("the sweep is not paused")
    return Decision(RequestEffect(paused=False), "trials start again")


Rule = Callable[[SweepSnapshot, Arguments], Decision]
ACTIONS: dict[str, Rule] = {
    "stop": decide_stop,
    "add": decide_add,
    "clone": decide_clone,
    "trials": decide_trials,
    "budget": decide_budget,
    "pause": decide_pause,
    "resume": decide_resume,
}


def decide(sweep: SweepSnapshot, request: Request) -> Decision:
    """Return what a request changes.

    Raises:
        UsageError: it cannot be carried out; the message is one line.
    """
    if request.action not in ACTIONS:
        guess = suggest(request.action, ACTIONS)
        raise UsageError(f"{request.action}: unknown action; {guess}use {join_names(ACTIONS)}")
    return ACTIONS[request.action](sweep, request.arguments)


def judge(sweep: SweepSnapshot, request: Request, now: float) -> RecordedRequest:
    """Return what the driver records about a request: that it is applied, or why not."""
    try:
        decision = decide(sweep, request)
    except UsageError as error:
        return RecordedRequest(**vars(request), applied=now, outcome="refused", reason=str(error))
    return RecordedRequest(
        **vars(request),
        applied=now,
        outcome="applied",
        reason=decision.text,
        effect=decision.effect,
    )


def take_in(sweep: SweepSnapshot, request: Request, now: float) -> SweepSnapshot:
    """Return a sweep as it will be once a request that waits has been applied."""
    return replace(sweep, requests=[*sweep.requests, judge(sweep, request, now)])


def _add(sweep: SweepSnapshot, effect: RequestEffect) -> Decision:
    _refuse_population(sweep.spec, "its members meet one another from the start")
    point = effect.point or {}
    if author := sweep.find_author(effect):
        raise UsageError(f"{author} has added this configuration already")
    _refuse_spent_budget(sweep)
    names = sweep.spec.space.select_active(point)
    if point.keys() >= {name for name in names if name in sweep.spec.space.dimensions}:
        for record in sweep.records:
            if record.is_training and all(record.params[n] == v for n, v in point.items()):
                raise UsageError(f"trial {record.number} has this configuration already")
    when = "the sweep is resumed" if sweep.state.pause else "a slot is free"
    return Decision(effect, f"it starts once {when}, in addition to search.trials")


def _change(sweep: SweepSnapshot, changes: Mapping[str, float]) -> Decision:
    before = {name: read_setting(sweep.spec, name) for name in changes}
    if before == changes:
        same = ", ".join(f"search.{name} is {value:,g}" for name, value in before.items())
        raise UsageError(f"{same} already")
    text = "; ".join(f"search.{n} is {v:,g} instead of {before[n]:,g}" for n, v in changes.items())
    settings = {n: Setting(v, read_setting(sweep.file, n)) for n, v in changes.items()}
    return Decision(RequestEffect(settings=settings), text)


def _refuse_spent_budget(sweep: SweepSnapshot) -> None:
    if reason := describe_spent_budget(sweep.spec, sweep.records, sweep.hours):
        raise UsageError(f"{reason}, so no trial would start; raise it first, with: budget")


def _refuse_population(spec: SweepSpec, why: str) -> None:
    if isinstance(spec.search.scheduler, PbtSettings):
        raise UsageError(f"this sweep trains a population, and {why}")


def _check_section(section: type[Budget] | type[Search], name: str, value: Any) -> None:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input ")
        raise UsageError(f"{name} = {value!r}: {reason}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} = {value!r}: not finite")


def _check_names(arguments: Arguments, *names: str) -> None:
    for name in arguments:
        if name not in names:
            takes = f"use {join_names(names)}" if names else "it takes none"
            raise UsageError(f"{name}: unknown argument; {suggest(name, names)}{takes}")
    for name in names:
        if name not in arguments and name != "force":
            raise UsageError(f"the argument {name} is missing")


def _read_mapping(arguments: Arguments, name: str, example: str) -> Arguments:
    values = arguments[name]
    if not isinstance(values, Mapping) or not values:
        raise UsageError(f"name at least one parameter and its value, such as {example}")
    return values
