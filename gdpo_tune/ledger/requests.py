"""Requests of people to a sweep that runs: rules, the state that they lead to, and their files.

The rules are checked before a request is left, and again by the driver before it is applied,
because the sweep went on meanwhile. On its way to the driver each request is one file:

    <storage>/<name>/requests/<asked, in nanoseconds>-<id>.json
                     requests/damaged/     files that are not valid requests

A file is whole or absent, and durable before the person is told. The driver removes it once the
ledger has the request.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import RecordedRequest, Request, RequestEffect, Setting
from gdpo_tune.core.files import is_directory, write_atomically
from gdpo_tune.core.text import format_count, join_names, suggest
from gdpo_tune.core.trials import Params, Part, TrialRecord, check_part_weights
from gdpo_tune.ledger.budget import compute_spending, count_started, describe_spent_budget
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.load import read_point
from gdpo_tune.spec.model import Budget, Search

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


@dataclass(frozen=True)
class Decision:
    """A request that can be applied."""

    effect: RequestEffect
    text: str
    """Result of the request, in one line for a person."""


def _decide_stop(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
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
    if trial.role == "start":
        raise UsageError(f"trial {trial.number} is the start, for which all other trials wait")
    how = "ends" if trial.state == "paused" else "ends at its next step"
    return Decision(RequestEffect(stop=trial.number), f"trial {trial.number} {how}")


def _decide_add(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    params = _read_mapping(arguments, "params", "add learning_rate=1e-4")
    force = arguments.get("force") is True
    return _add(sweep, read_point(sweep.spec, params, force=force))


def _decide_clone(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    trial, force = sweep.find_trial(arguments), arguments.get("force") is True
    if not trial.trained_params:
        raise UsageError(f"trial {trial.number} ({trial.role}) trains nothing that can be cloned")
    changes = _read_mapping(arguments, "changes", f"clone {trial.number} learning_rate=1e-4")
    point = read_point(sweep.spec, changes, trial.trained_params, force=force)
    if all(trial.params[name] == value for name, value in point.items()):
        raise UsageError(f"trial {trial.number} has these values already, so this changes nothing")
    return _add(sweep, point)


def _decide_merge(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    spec = sweep.spec
    if not spec.has_candidates:
        why = "keep: none keeps no policy" if spec.keep == "none" else "it judges costs of training"
        raise UsageError(f"this sweep evaluates no merges: {why}")
    parts = read_parts(sweep.records, _read_mapping(arguments, "weights", "7=0.3 12@40=0.7"))
    if earlier := find_open_merge(sweep, parts):
        raise UsageError(f"{earlier.author} has asked for this merge already")
    when = "the sweep is resumed" if sweep.state.pause else "a slot is free"
    return Decision(RequestEffect(parts=parts), f"it is evaluated once {when}")


def read_parts(records: Sequence[TrialRecord], weights: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of a merge: `{"7": 0.3, "12@40": 0.7}`, by trial and step.

    Raises:
        UsageError: a name is no trained policy that was kept, or the weights do not sum to 1.
    """
    parts: dict[tuple[int, int], Part] = {}
    for name, weight in weights.items():
        word, _, step = name.partition("@")
        number = int(word) if word.isdecimal() and len(word) < 10 else -1
        if not 0 <= number < len(records) or (step and not step.isdecimal()):
            raise UsageError(f"{name}: a part of a merge is a trial (7) or a checkpoint (12@40)")
        record = records[number]
        is_whole = record.is_training and record.state == "complete"
        steps = record.policy_steps if is_whole else ()
        wanted = int(step) if step else record.last_step or 0
        if wanted not in steps:
            kept = join_names([f"{number}@{each}" for each in steps]) if steps else "no policy"
            raise UsageError(
                f"{name}: there is no such policy; of trial {number} ({record.role}, "
                f"{record.state}) the sweep has {kept}"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1:
            raise UsageError(f"{name} = {weight!r}: the weight of a part is above 0 and below 1")
        if (number, wanted) in parts:
            raise UsageError(f"{name}: this policy stands twice; add up its weights")
        parts[number, wanted] = Part(number, wanted, float(weight))
    if len(parts) < 2:
        raise UsageError("a merge has two parts or more, such as 7=0.3 12@40=0.7")
    try:
        check_part_weights([part.weight for part in parts.values()])
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tuple(parts[key] for key in sorted(parts))


def find_open_merge(sweep: SweepSnapshot, parts: Sequence[Part]) -> RecordedRequest | None:
    """Return the request for this merge whose trial waits or runs; None if there is none."""
    ended = {record.request for record in sweep.records if not record.is_open}
    asked = (r for r in sweep.requests if r.effect.parts == parts and r.id not in ended)
    return next(asked, None)


def _decide_trials(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    number, started = arguments["number"], count_started(sweep.records)
    if isinstance(number, int) and number < started:
        raise UsageError(f"trials = {number}: {started} have started already; write at least that")
    _check_section(Search, "trials", number)
    if sweep.spec.search.is_divided:
        raise UsageError("halving decides how many train; give it a larger budget, with: budget")
    if number > sweep.spec.search.trials:
        _refuse_spent_budget(sweep)
    return _change(sweep, {"trials": number})


def _decide_budget(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    if not arguments:
        raise UsageError(f"name a limit: {join_names(Budget.model_fields)}")
    spent = compute_spending(sweep.spec, sweep.records, sweep.hours)
    for name, value in arguments.items():
        _refuse_unknown("limit", name, Budget.model_fields)
        _check_section(Budget, name, value)
        if name == "gpu_hours" and value and not sweep.spec.resources.gpus:
            raise UsageError("gpu_hours: no trial has a GPU, so it would never be spent")
        if value and value < spent[name]:
            raise UsageError(
                f"{name} = {value:,g}: {spent[name]:,.6g} are spent already; write more, or pause"
            )
    return _change(sweep, {f"{BUDGET}{name}": value for name, value in arguments.items()})


def _decide_pause(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    if pause := sweep.state.pause:
        raise UsageError(f"the sweep is paused already, by {pause.author}")
    running = sum(record.state == "running" for record in sweep.records)
    ends = f"; {format_count(running, 'running trial')} will end normally" if running else ""
    return Decision(RequestEffect(paused=True), f"no further trial starts{ends}")


def _decide_resume(sweep: SweepSnapshot, arguments: Arguments) -> Decision:
    if sweep.state.pause is None:
        raise UsageError("the sweep is not paused")
    return Decision(RequestEffect(paused=False), "trials start again")


Rule = Callable[[SweepSnapshot, Arguments], Decision]
ACTIONS: dict[str, tuple[Rule, Sequence[str] | None]] = {
    "stop": (_decide_stop, ("trial",)),
    "add": (_decide_add, ("params", "force")),
    "clone": (_decide_clone, ("trial", "changes", "force")),
    "merge": (_decide_merge, ("weights",)),
    "trials": (_decide_trials, ("number",)),
    "budget": (_decide_budget, None),
    "pause": (_decide_pause, ()),
    "resume": (_decide_resume, ()),
}
"""Name -> rule that decides on it, and its arguments; None: the limits of a sweep."""


def check_request(sweep: SweepSnapshot, request: Request) -> Decision:
    """Return what a request changes.

    Raises:
        UsageError: it cannot be carried out; the message is one line.
    """
    _refuse_unknown("action", request.action, ACTIONS)
    (decide, names), arguments = ACTIONS[request.action], request.arguments
    if names is not None:
        for name in arguments:
            _refuse_unknown("argument", name, names)
        for name in names:
            if name not in arguments and name != "force":
                raise UsageError(f"the argument {name} is missing")
    return decide(sweep, arguments)


def settle_request(sweep: SweepSnapshot, request: Request, now: float) -> RecordedRequest:
    """Return what the driver records about a request: that it is applied, or why not."""
    recorded = partial(RecordedRequest, **vars(request), applied=now)
    try:
        decision = check_request(sweep, request)
    except UsageError as error:
        return recorded(outcome="refused", reason=str(error))
    return recorded(outcome="applied", reason=decision.text, effect=decision.effect)


def preview_request(sweep: SweepSnapshot, request: Request, now: float) -> SweepSnapshot:
    """Return a sweep as it will be once a request that waits has been applied."""
    return replace(sweep, requests=[*sweep.requests, settle_request(sweep, request, now)])


def _add(sweep: SweepSnapshot, point: Params) -> Decision:
    effect = RequestEffect(point=point)
    for request in sweep.requests:
        if request.effect == effect:
            raise UsageError(f"{request.author} has added this configuration already")
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


def _check_section(section: type[Budget] | type[Search], name: str, value: Any) -> None:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input ")
        raise UsageError(f"{name} = {value!r}: {reason}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} = {value!r}: not finite")


def _refuse_unknown(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        fix = f"use {join_names(known)}" if known else "it takes none"
        raise UsageError(f"{name}: unknown {kind}; {suggest(name, known)}{fix}")


def _read_mapping(arguments: Arguments, name: str, example: str) -> Arguments:
    values = arguments[name]
    if not isinstance(values, Mapping) or not values:
        raise UsageError(f"name at least one parameter and its value, such as {example}")
    return values


BUDGET = "budget."
"""Prefix of the settings of `search.budget`; the others are of `search`."""


@dataclass(frozen=True)
class SteeringState:
    """Effects of all recorded requests."""

    stopped: Mapping[int, str] = field(default_factory=dict[int, str])
    """Number of a trial that has to end -> the reason."""
    added: Mapping[str, RequestEffect] = field(default_factory=dict[str, RequestEffect])
    """Id of a request -> the configuration or the merge that it adds."""
    pause: RecordedRequest | None = None
    """The request that paused the sweep; None if it is not paused."""
    pauses: tuple[tuple[float, float], ...] = ()
    """Start and end of each pause in Unix seconds; the end of one that lasts is infinite."""

    def list_waiting(self, records: Iterable[TrialRecord]) -> list[tuple[str, RequestEffect]]:
        """Return the added configurations and merges without a trial, by their request's id."""
        if not self.added:
            return []
        started = {record.request for record in records}
        return [(id, effect) for id, effect in self.added.items() if id not in started]


def fold_requests(requests: Sequence[RecordedRequest]) -> SteeringState:
    """Return what requests, in order, have asked for."""
    stopped, added = dict[int, str](), dict[str, RequestEffect]()
    pause: RecordedRequest | None = None
    pauses: list[tuple[float, float]] = []
    for request in requests:
        effect = request.effect
        if effect.stop is not None:
            stopped[effect.stop] = f"stopped by {request.author}"
        if effect.point is not None or effect.parts:
            added[request.id] = effect
        if effect.paused:
            pause = request
        elif effect.paused is not None and pause is not None:
            pauses.append((pause.applied, request.applied))
            pause = None
    if pause is not None:
        pauses.append((pause.applied, math.inf))
    return SteeringState(stopped, added, pause, tuple(pauses))


def apply_settings(spec: SweepSpec, requests: Iterable[RecordedRequest]) -> SweepSpec:
    """Return the spec of a sweep's file with the settings that requests have changed.

    A change holds as long as the file has the value that it had then: a later value of the file
    wins.
    """
    changes: dict[str, float] = {}
    for request in requests:
        for name, setting in request.effect.settings.items():
            if read_setting(spec, name) == setting.file:
                changes[name] = setting.value
    if not changes:
        return spec
    own = {name: value for name, value in changes.items() if not name.startswith(BUDGET)}
    limits = {n.removeprefix(BUDGET): v for n, v in changes.items() if n.startswith(BUDGET)}
    budget = spec.search.budget.model_copy(update=limits)
    search = spec.search.model_copy(update={**own, "budget": budget})
    return spec.model_copy(update={"search": search})


def read_setting(spec: SweepSpec, name: str) -> float:
    """Return a setting of `search` by the name that `RequestEffect.settings` has."""
    section = spec.search.budget if name.startswith(BUDGET) else spec.search
    return getattr(section, name.removeprefix(BUDGET))


def decode_recorded(stored: Mapping[str, Any]) -> RecordedRequest:
    """Return a recorded request from JSON."""
    values, effect = dict(stored), dict[str, Any](stored["effect"])
    effect["settings"] = {name: Setting(**value) for name, value in effect["settings"].items()}
    effect["parts"] = tuple(Part(**part) for part in effect["parts"])
    values["effect"] = RequestEffect(**effect)
    return RecordedRequest(**values)


REQUESTS = "requests"
"""Directory in that of a sweep."""
DAMAGED_DIRECTORY = "damaged"
"""Directory below it for files that are not valid requests."""
MAX_BYTES = 1_000_000
"""Most bytes of a file that is read."""


@dataclass(frozen=True)
class RequestFile:
    """A file that waits for the driver."""

    path: Path
    request: Request | None
    """None: the file is not a valid request."""
    problem: str = ""
    """Why it is not a valid request."""


def build_request(action: str, arguments: Any, author: str | None) -> Request:
    """Build a request of this moment; its author is by default the user of this process.

    Raises:
        UsageError: `arguments` are not a mapping.
    """
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{action}: the arguments are {arguments!r}; write a dict, such as {{}}")
    words = (find_user() if author is None else author).split()
    name = "".join(filter(str.isprintable, " ".join(words)))[:100]
    return Request(uuid.uuid4().hex[:16], action, dict(arguments), name or "unknown", time.time())


def find_user() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number that has no name
        return f"user {os.getuid()}"


def leave_request(directory: Path, request: Request) -> Path:
    """Leave a request in a sweep's directory, whole and durable; return its file.

    Raises:
        UsageError: this user may not write there, or no directory can be there.
        OSError: the disk is full or broken.
    """
    check_requests_writable(directory)
    requests = directory / REQUESTS
    path = requests / f"{int(request.asked * 1e9):020}-{request.id}.json"
    if not requests.exists():
        requests.mkdir(exist_ok=True)
        requests.chmod(directory.stat().st_mode & 0o7777)  # who may write there may ask too
    write_atomically(path, json.dumps(asdict(request)))
    for changed in (requests, directory):
        descriptor = os.open(changed, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network disks cannot; they write names at once
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return path


def check_requests_writable(directory: Path) -> None:
    """Refuse, with a UsageError, to leave requests where this user or no directory can be."""
    requests = directory / REQUESTS
    if os.path.lexists(requests) and not is_directory(requests):
        raise UsageError(
            f"{requests} is not a directory, so no request can be left there\n    fix: move it away"
        )
    if not os.access(requests if requests.exists() else directory, os.W_OK | os.X_OK):
        owner = "another user"
        with suppress(OSError, KeyError):
            owner = directory.owner()
        raise UsageError(
            f"{directory} belongs to {owner}, and you may not write there\n"
            "    fix: ask them, or ask for permission to write to the sweep's directory"
        )


def list_pending(directory: Path) -> list[RequestFile]:
    """Return the files that wait in a sweep's directory, in the order of their names."""
    with suppress(OSError):  # absent, no directory, or for now out of reach
        names = sorted(os.listdir(directory / REQUESTS))
        # the name of a draft begins with a full stop
        kept = (n for n in names if n != DAMAGED_DIRECTORY and not n.startswith("."))
        files = [_read_request_file(directory / REQUESTS / name) for name in kept]
        return [file for file in files if file is not None]
    return []


def _read_request_file(path: Path) -> RequestFile | None:
    try:
        if path.stat().st_size > MAX_BYTES:
            return RequestFile(path, None, f"it has more than {MAX_BYTES:,} bytes")
        stored: Any = json.loads(path.read_bytes())
        kinds = {"id": str, "action": str, "arguments": dict, "author": str, "asked": int | float}
        values = {name: stored[name] for name in kinds}
        for name, kind in kinds.items():
            if not isinstance(values[name], kind):
                raise ValueError(f"{name} = {values[name]!r}")
        if not 0 <= values["asked"] < 2**33:
            raise ValueError(f"asked = {values['asked']!r} is not a valid time")
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # it can be stored, shown
        return RequestFile(path, Request(**values))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return RequestFile(path, None, f"{type(error).__name__}: {error}")


def set_aside(path: Path) -> None:
    """Move a file that is not a valid request out of the way; nothing is deleted."""
    aside = path.parent / DAMAGED_DIRECTORY
    aside.mkdir(exist_ok=True)
    path.rename(aside / path.name)
