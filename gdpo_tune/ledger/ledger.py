"""The one durable record of a sweep: every trial with its values, state, cost and reason.

    <storage>/<name>/ledger.journal    the Optuna study, one record a line
                     ledger.lock       the process that writes it
                     spec.yaml         the resolved spec
                     trials/<number>/  step metrics and checkpoints

MLflow and every figure can be written again from the study and the step metrics. The values of the
study are the objectives on validation prompts, which a sampler may see. Estimates on test prompts,
which decide the front, are stored beside them.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from gdpo_tune.core.content import Fact, compare_starts
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import Incident, RecordedRequest
from gdpo_tune.core.locks import Lease
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.text import make_printable
from gdpo_tune.core.trial_files import TRIALS
from gdpo_tune.core.trials import (
    CHECKPOINT_PREFIX,
    INITIAL,
    Cost,
    Measurement,
    Outcome,
    Params,
    Part,
    Proposer,
    Role,
    State,
    TrialRecord,
)
from gdpo_tune.ledger import opening
from gdpo_tune.ledger import trial_encoding as encoding
from gdpo_tune.ledger.budget import WorkClock, compute_hours
from gdpo_tune.ledger.journal import Journal, open_storage
from gdpo_tune.ledger.requests import (
    SteeringState,
    SweepSnapshot,
    apply_settings,
    decode_recorded,
    fold_requests,
)
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import BASELINES

SESSION, INCIDENT, REQUEST = "session:", "incident:", "request:"
CONTENT = "content:"
"""Prefixes of the study's attributes, before a number that starts at 0."""


class Ledger(CloseableResource):
    """Trials of a sweep, and its history. Create it with `open`; use it as a context manager.

    Each session, incident, request and content has an attribute of the study. The
    writer keeps all records in memory, so reading them costs no disk access.
    """

    def __init__(
        self,
        spec: SweepSpec,
        journal: Journal,
        lease: Lease | None = None,
        moved_aside: Path | None = None,
    ) -> None:
        self.spec = spec
        """With the settings that requests have changed, and with constraints that have the values
        of the baselines that were measured."""
        self.steering = SteeringState()
        self._file_spec = spec
        self.directory = spec.directory.absolute()
        self.moved_aside = moved_aside
        """Directory of an earlier sweep of this name, if `open` moved it."""
        self._clock = WorkClock()
        """Runs in a session, which is the time in which one process ran trials."""
        self._requests: list[RecordedRequest] = []  # decoded so far
        self._journal = journal
        self._lease = lease
        self._stale: set[int] = set()
        """Numbers of trials whose records in memory are out of date."""
        try:
            storage = open_storage(journal)
            study = opening.open_study(storage, spec, writable=lease is not None)
            self.study = study
            """The Optuna study, for `optuna.visualization` and the like; never write through it."""
            self._storage = storage
            self._study_id = storage.get_study_id_from_name(study.study_name)
            spec = opening.pin_template_date(study, spec, writable=lease is not None)
            self.spec = self._file_spec = spec
            self._records = self._load()
            self._resolve_spec()
            if lease is not None:
                opening.write_spec(spec)
                if not spec.address:
                    opening.separate_copy(study, spec)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, spec: SweepSpec, *, fresh: bool = False, read_only: bool = False) -> Ledger:
        """Open the sweep's ledger, or begin one.

        `fresh` moves an earlier sweep of this name aside (nothing is deleted) and begins again.
        With `read_only` no lease is taken and nothing changed; another process may write meanwhile.

        Raises:
            LedgerHeldError: another live process writes this ledger.
            IdentityError: the ledger belongs to a sweep with another task, policy, objectives,
                space or training; or another machine has continued this one apart.
            UsageError: `read_only` and there is no such sweep yet, the directory cannot be used,
                or another version wrote the ledger.
        """
        try:
            if read_only:
                return cls(spec, opening.open_for_reading(spec))
            return cls(spec, *opening.open_for_writing(spec, fresh=fresh))
        except OSError as error:
            raise UsageError(
                f"the sweep cannot be kept in {spec.directory.absolute()}: {error}; make that "
                "directory readable and writable, or choose another with --set storage=DIRECTORY"
            ) from error

    @property
    def sweep_id(self) -> str:
        """Random id of this ledger; empty if an older version began it."""
        return self.study.user_attrs.get(opening.SWEEP_ID, "")

    def close(self) -> None:
        """Close the journal and end the lease; a second call does nothing."""
        self._clock.ended.set()
        self._journal.close()
        if self._lease is not None:
            self._lease.release()

    def compare_content(self, current: Mapping[str, Fact], *, accept: bool = False) -> None:
        """Refuse content that differs from that of earlier trials; record it where it is new.

        With `accept` a change is recorded, and the trials before and after it are marked.

        Raises:
            IdentityError: something differs, and `accept` is false.
        """
        ways = (
            "or --fresh to move that sweep aside and begin anew; if the change decides no value, "
            "as in a comment, --accept-changes goes on, with all trials on one front"
        )
        earlier = self.get_contents()
        contents = compare_starts(earlier, current, self.spec.location, ways, accept=accept)
        if contents != earlier:
            newest = {"first": len(self._records), **contents[-1]}
            self._set_entry(CONTENT, len(contents) - 1, newest)
            self._stale.update(range(len(self._records)))

    def get_records(self) -> list[TrialRecord]:
        """Return every trial, by number."""
        if self._lease is None:
            self._records = self._read_all()
            self._resolve_spec()
        if self._stale:
            trials, stale = self._get_trials(), sorted(self._stale)
            records = self._read([trials[number] for number in stale])
            for number, record in zip(stale, records, strict=True):
                self._records[number] = record
            self._stale.clear()
        return list(self._records)

    def get_record(self, number: int) -> TrialRecord:
        """Return one trial."""
        if number in self._stale:
            (self._records[number],) = self._read([self._get_trial(number)])
            self._stale.discard(number)
        return self._records[number]

    def start(
        self,
        params: Params,
        role: Role,
        proposer: Proposer,
        seed: int,
        replicate_of: int | None = None,
        parts: Sequence[Part] = (),
        request: str = "",
    ) -> TrialRecord:
        """Record a new trial as running, in one write; delete its directory if there is one.

        `params` are complete, or empty for a merge; `replicate_of` is the number of the trial that
        it repeats, and `request` the id of the request that added it.
        """
        attributes = {
            "role": role,
            "proposer": proposer,
            "seed": seed,
            "replicate_of": replicate_of,
            "params": dict(params),
            **({"parts": [astuple(part) for part in parts]} if parts else {}),
            **({"request": request} if request else {}),
        }
        number = len(self._records)
        # A trial whose record was torn off has left checkpoints of other parameters.
        if self.get_trial_directory(number).exists():
            shutil.rmtree(self.get_trial_directory(number))
        # For Optuna, a trial that trains nothing has no parameters, on which its values depend.
        searched = {} if parts or role in INITIAL else params
        trial = encoding.create_running_trial(self.spec, searched, attributes)
        self._storage.create_new_trial(self._study_id, trial)
        self._records += self._read([self._get_trial(number)])
        return self._records[number]

    def record_rung(self, number: int, measurement: Measurement) -> bool:
        """Record a measurement on validation prompts; return False if its rung is recorded already.

        A trial that resumes from an earlier step measures again, but decisions rest on the first
        measurement.

        Raises:
            NonFiniteError: a value is NaN or infinite.
        """
        key = f"{encoding.RUNG}{measurement.cost.completions}"
        if key in self._get_trial(number).user_attrs:
            return False
        self._set(number, key, encoding.encode_rung(measurement, self.spec))
        return True

    def pause(self, number: int) -> TrialRecord:
        """Record that a trial waits at its last rung for a promotion."""
        rung = self.get_record(number).rungs[-1]
        self._set(number, "pause", {"at": rung.completions, "waits": True})
        return self.get_record(number)

    def resume(self, number: int, *, ends: str | None = None) -> TrialRecord:
        """Record that a paused trial runs again; `ends` says why it ends where it waited."""
        record = self.get_record(number)
        pause: dict[str, object] = {"at": record.paused_at, "waits": False}
        if ends is not None:
            pause |= {"ends_at": record.rungs[-1].step, "why": ends}
        self._set(number, "pause", pause)
        return self.get_record(number)

    def complete(self, number: int, outcome: Outcome) -> TrialRecord:
        """Record a trial's outcome, or a failure if a judged value is missing or not finite."""
        splits = {
            "validation": encoding.add_judged_costs(outcome.validation, outcome.cost, self.spec),
            "test": encoding.add_judged_costs(outcome.test, outcome.cost, self.spec),
        }
        for split, estimates in splits.items():
            for name in self.spec.required_metrics:
                if name not in estimates or not math.isfinite(estimates[name].mean):
                    value = estimates[name].mean if name in estimates else "missing"
                    return self.fail(number, f"{split} {name} is {value}", outcome.cost)
        with self._journal.write_batch():
            outcome = replace(outcome, **splits)
            self._set(number, "outcome", encoding.encode_outcome(outcome, self.directory))
            for name in self.spec.objectives:  # for people, such as in Optuna's dashboard
                value = outcome.test[name].mean
                trial_id = self._get_trial_id(number)
                self._storage.set_trial_user_attr(trial_id, f"{encoding.TEST}{name}", value)
            self._close_trial(number)
        record = self.get_record(number)
        if record.role in BASELINES:
            self._resolve_spec()
        return self.get_record(number)

    def fail(self, number: int, reason: str, cost: Cost | None = None) -> TrialRecord:
        """Record that a trial ended without a result; by default at the cost of its last rung."""
        return self._end(number, "failed", reason, cost or self.get_record(number).cost)

    def prune(self, number: int, reason: str, cost: Cost) -> TrialRecord:
        """Record that the scheduler or a person stopped a trial."""
        return self._end(number, "pruned", reason, cost)

    def record_request(self, request: RecordedRequest) -> None:
        """Record a request in one write, and let `spec` and `steering` follow from it."""
        self._append(REQUEST, asdict(request))
        self._resolve_spec()

    def begin_session(
        self, started: float, slots: int, provenance: Mapping[str, Any], sampler: str = ""
    ) -> int:
        """Record that a process works on this sweep; return the session's number.

        `started` is in Unix seconds, `slots` the number of trials that run side by side.
        `provenance` holds revision, versions and hardware as JSON, `sampler` a name and a reason.
        """
        opening.record_origin(self.study, self.spec)
        self._clock.ended.set()  # of a session that was not ended
        self._clock = WorkClock()
        self._clock.start()
        content = {"started": started, "slots": slots, "provenance": dict(provenance)}
        return self._append(SESSION, {**content, "sampler": sampler})

    def end_session(self, session: int, ending: str = "") -> None:
        """Record that the process has stopped working on the sweep.

        `ending` says why nothing was left to run, for a person; it is empty if something was left.
        """
        self._clock.ended.set()
        self.record_gaps()
        content = {**self._list(SESSION)[session], "finished": time.time(), "ending": ending}
        self._set_entry(SESSION, session, content)

    def record_gaps(self) -> None:
        """Record in the newest session when its process did not work; usually that is never."""
        if gaps := self._clock.take_gaps():
            *_, newest = sessions = self._list(SESSION)
            content = {**newest, "gaps": [*newest.get("gaps", ()), *map(list, gaps)]}
            self._set_entry(SESSION, len(sessions) - 1, content)

    def record_ending(self, ending: str) -> None:
        """Record why nothing is left to run, if the newest session was killed before it did.

        It still has no `finished`, so that its hours count as before.
        """
        sessions = self._list(SESSION)
        if sessions and not sessions[-1].get("ending"):
            self._set_entry(SESSION, len(sessions) - 1, {**sessions[-1], "ending": ending})

    def record_incident(self, incident: Incident) -> None:
        """Record an incident in the newest session."""
        session, trials = len(self._list(SESSION)) - 1, list(incident.trials)
        content = {"time": incident.time, "what": incident.description, "trials": trials}
        self._append(INCIDENT, {**content, "session": session})

    def get_sessions(self) -> list[dict[str, Any]]:
        """Return the sessions in order, as `begin_session` and `end_session` wrote them.

        One that runs or was killed has no `finished` (Unix seconds), and no `ending` until the
        sweep is found finished. `incidents` has `Incident`s, `gaps` what `WorkClock` found.
        """
        incidents = defaultdict[int, list[Incident]](list)
        for stored in self._list(INCIDENT):
            incident = Incident(stored["time"], stored["what"], tuple(stored["trials"]))
            incidents[stored["session"]].append(incident)
        return [
            {**stored, "incidents": incidents[session]}
            for session, stored in enumerate(self._list(SESSION))
        ]

    def get_contents(self) -> list[dict[str, Any]]:
        """Return the content that decided the results, by time; see `Ledger.compare_content`.

        An entry is one of `compare_starts`, with the number of the `first` trial with its digests.
        """
        return self._list(CONTENT)

    def get_requests(self) -> list[RecordedRequest]:
        """Return every request that was applied or refused, in order; do not change the list."""
        attributes = self._storage.get_study_user_attrs(self._study_id)
        while stored := attributes.get(f"{REQUEST}{len(self._requests)}"):
            self._requests.append(decode_recorded(stored))
        return self._requests

    def take_snapshot(self, now: float | None = None) -> SweepSnapshot:
        """Return the sweep as the rules of requests see it; `now`: Unix time, if it runs."""
        records = self.get_records()
        hours = compute_hours(self.get_sessions(), records, now, self.steering.pauses)
        return SweepSnapshot(self._file_spec, records, self.get_requests(), hours)

    def compute_hours(self, now: float | None = None) -> float:
        """Return the running time of the sweep in hours, without pauses; `now` if it runs."""
        records = self.get_records()
        return compute_hours(self.get_sessions(), records, now, self.steering.pauses)

    def refresh_checkpoints(self, numbers: Sequence[int]) -> None:
        """Read again which of these trials have a checkpoint."""
        self._stale.update(numbers)

    def get_trial_directory(self, number: int) -> Path:
        """Return the directory of a trial."""
        return self.directory / TRIALS / str(number)

    def get_checkpoint(self, number: int, step: int) -> Path:
        """Return the directory of a trial's checkpoint, which may not exist."""
        return self.get_trial_directory(number) / f"{CHECKPOINT_PREFIX}{step}"

    def _load(self) -> list[TrialRecord]:
        """Return the records of all trials; close those whose end a crash has left half written.

        Raises:
            UsageError: another version wrote the ledger.
        """
        try:
            for trial in self._get_trials():
                has_ended = trial.user_attrs.keys() & {"outcome", "end"}
                if self._lease is not None and trial.state == TrialState.RUNNING and has_ended:
                    self._close_trial(trial.number)  # a crash has kept its state from being written
            records = self._read_all()
            for record in records:
                missing = self.spec.space.domains.keys() - record.params.keys()
                if missing and not record.parts:
                    raise KeyError(min(missing))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UsageError(
                f"{self._journal.path}: another version of gdpo_tune wrote this ledger ({reason}); "
                "move the sweep aside with --fresh, or choose another --name"
            ) from error
        return records

    def _resolve_spec(self) -> None:
        """Apply requests to the spec; give bounds that refer to a baseline its value."""
        requests = self.get_requests()
        self.steering = fold_requests(requests)
        before = self.spec.constraints
        steered = apply_settings(self._file_spec, requests)
        self.spec = steered.resolve_constraints(self._records)
        if self.spec.constraints != before:  # they decide who meets them
            self._stale.update(range(len(self._records)))

    def _get_trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _get_trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._get_trial_id(number))

    def _get_trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _read_all(self) -> list[TrialRecord]:
        self._stale.clear()
        return self._read(self._get_trials())

    def _read(self, trials: Sequence[FrozenTrial]) -> list[TrialRecord]:
        # Each reading of the study's attributes reads the journal, so once for all trials.
        contents = self.get_contents()
        return [
            encoding.decode_trial(trial, self.spec, self.directory, contents) for trial in trials
        ]

    def _set(self, number: int, key: str, value: Mapping[str, Any]) -> None:
        self._storage.set_trial_user_attr(self._get_trial_id(number), key, dict(value))
        self._stale.add(number)

    def _end(self, number: int, state: State, reason: str, cost: Cost) -> TrialRecord:
        with self._journal.write_batch():
            end = {"state": state, "reason": make_printable(reason), "cost": vars(cost)}
            self._set(number, "end", end)
            self._close_trial(number)
        return self.get_record(number)

    def _close_trial(self, number: int) -> None:
        trial, trial_id = self._get_trial(number), self._get_trial_id(number)
        self._stale.add(number)
        if "outcome" not in trial.user_attrs:
            pruned = trial.user_attrs["end"]["state"] == "pruned"
            state = TrialState.PRUNED if pruned else TrialState.FAIL
            self._storage.set_trial_state_values(trial_id, state)
            return
        (record,) = self._read([trial])
        values = {name: estimate.mean for name, estimate in record.validation.items()}
        for name, bound in self.spec.constraints.items():
            if name not in trial.constraints and name in values and bound.is_known:
                violation = bound.compute_violation(values[name])
                Trial(self.study, trial_id).set_constraint(name, violation)
        objectives = [values[name] for name in self.spec.objectives]
        self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, objectives)

    def _append(self, prefix: str, content: Mapping[str, Any]) -> int:
        number = len(self._list(prefix))
        self._set_entry(prefix, number, content)
        return number

    def _set_entry(self, prefix: str, number: int, content: Mapping[str, Any]) -> None:
        self._storage.set_study_user_attr(self._study_id, f"{prefix}{number}", content)

    def _list(self, prefix: str) -> list[dict[str, Any]]:
        attributes = self._storage.get_study_user_attrs(self._study_id)
        count = sum(key.startswith(prefix) for key in attributes)
        return [attributes[f"{prefix}{number}"] for number in range(count)]
