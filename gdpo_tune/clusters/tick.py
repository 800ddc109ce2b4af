"""Carrying decisions out: looking at jobs, submitting and stopping them, and writing it all down.

Claims come before what they claim, and what backends do is idempotent: killed between the two, the
next call does it again under the same name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gdpo_tune.clusters import decide, notify, outcome
from gdpo_tune.clusters.backends.base import Backend, Job, Look, backend_of
from gdpo_tune.clusters.book import Book, Run
from gdpo_tune.clusters.load_schedules import ScheduledSweep, overrides
from gdpo_tune.clusters.log import Event, EventLog, TooLate, file_name
from gdpo_tune.clusters.store import open_store
from gdpo_tune.core.errors import BackendError, BackendUnreachableError, GdpoTuneError

Clock = Callable[[], datetime]
"""The time, in UTC."""


@dataclass
class Desk:
    """One schedule as it stands: its file, its history, its backend."""

    sweep: ScheduledSweep
    log: EventLog
    book: Book
    clock: Clock
    make_backend: Callable[[ScheduledSweep], Backend] = backend_of
    figures: Callable[[ScheduledSweep, str, str | None], dict[str, Any]] = outcome.figures
    added: list[Event] = field(default_factory=list[Event])
    """Events that were appended here."""
    trouble: list[GdpoTuneError] = field(default_factory=list[GdpoTuneError])
    """What could not be done now, and may be done later: no backend answered."""

    def refresh(self) -> None:
        """Take in what others have appended.

        Raises:
            StoreError: it cannot be read, or makes no sense.
        """
        try:
            self.book.apply_all(self.log.refresh())
        except ValueError as error:
            raise self.log.unreadable(file_name(self.book.count)) from error

    def append(self, event: Event | None) -> bool:
        """Append an event; return whether there was any, or another one came first."""
        if event is None:
            return False
        try:
            self.log.append(event)
        except TooLate:
            self.refresh()
            return True
        self.book.apply(event)
        self.added.append(event)
        return True

    def note(self, event: Event) -> None:
        """Append something that is so, whatever others have appended meanwhile."""
        count = len(self.added)
        while len(self.added) == count:
            self.append(event)


def open_desk(sweep: ScheduledSweep, clock: Clock, *, read_only: bool = False) -> Desk:
    """The schedule of a file, with all of its history.

    Args:
        sweep: the file.
        clock: the time.
        read_only: nothing is to be appended.

    Raises:
        StoreError: the history cannot be read, or, where there is none yet, not be kept.
    """
    store = open_store(sweep.storage)
    desk = Desk(sweep, EventLog(store, sweep.name), Book(), clock)
    desk.refresh()
    if not desk.book.count and not read_only:
        store.check()
    return desk


def tick(desk: Desk) -> None:
    """Everything that is to be done now: look after the run under way, start what is due, tell."""
    look_after(desk)
    while desk.append(next_by_schedule(desk)):
        look_after(desk)
    notify.tell(desk)


def look_after(desk: Desk) -> None:
    """Bring the run under way as far as it gets now."""
    try:
        while (event := next_of_run(desk)) is not None:
            if event.kind == "submitted":
                note_submission(desk, event)
            else:
                desk.append(event)
    except BackendUnreachableError as error:
        desk.trouble.append(error)


def note_submission(desk: Desk, event: Event) -> None:
    """Write down that a backend has an attempt, which is so whatever others have appended.

    Where they have ended the run meanwhile, its job is told to end: nobody looks after it.
    """
    count, (run, attempt) = len(desk.added), (event.about["run"], event.about["attempt"])
    while len(desk.added) == count:
        known = desk.book.runs[run]
        if (known.attempt, known.state) == (attempt, "starting"):
            desk.append(event)
            continue
        if known.state != "running" or known.attempt != attempt:
            desk.make_backend(desk.sweep).stop(event.about["job"], 0.0)
        return


def next_by_schedule(desk: Desk) -> Event | None:
    """What happens by the schedule; nothing is claimed for a backend that would not take it."""
    event = decide.fate(desk.sweep, desk.book, desk.clock())
    if event is None or event.kind != "started":
        return event
    try:
        desk.make_backend(desk.sweep).check()
    except BackendUnreachableError as error:
        desk.trouble.append(error)
        return None
    return event


def next_of_run(desk: Desk) -> Event | None:
    """The next event of the run under way; None if there is none, or nothing to tell of it."""
    run, now = desk.book.active, desk.clock()
    if run is None:
        return None
    asked_to_stop = decide.stop(desk.sweep, desk.book, run, now)
    if asked_to_stop is not None:
        return asked_to_stop
    if run.state == "starting":
        return _start(desk, run, now)
    backend = desk.make_backend(desk.sweep)
    refuse_stranger(run, backend, desk.log)
    look = backend.look(run.job)
    if not look.running:
        return _after_end(desk, run, look, now)
    if run.stopping_since is not None:
        backend.stop(run.job, (now - run.stopping_since).total_seconds())
    return None


def refuse_stranger(run: Run, backend: Backend, log: EventLog) -> None:
    """Keep a backend away from a job that another one has begun, or that is none.

    Raises:
        BackendError: it is not its own.
        StoreError: the history does not say what the backend knows a job by.
    """
    begun_by = run.job.get("backend", backend.kind)
    if begun_by != backend.kind:
        raise BackendError(
            f"{run.id} was begun by backend {begun_by}, which the file does not name any more\n"
            f"    fix: write kind: {begun_by} until that run has ended; `render --to slurm` and "
            "`rayjob` begin runs as local ones, so call those with --here"
        )
    try:
        backend.job_shape.model_validate_json(json.dumps(run.job))
    except ValueError as error:
        raise log.unreadable(file_name(run.submitted)) from error


def _after_end(desk: Desk, run: Run, look: Look, now: datetime) -> Event:
    state, reason = decide.after_end(desk.sweep, run, look)
    if state == "starting":
        return decide.retried(run, look, now)
    return ended(desk, run, state, reason, look.status)


def ended(desk: Desk, run: Run, state: str, reason: str, status: int | None = None) -> Event:
    """The end of a run, with what it has come to."""
    about: dict[str, Any] = {"run": run.id, "attempt": run.attempt, "state": state}
    about |= {"reason": reason} if reason else {}
    about |= {"status": status} if status is not None else {}
    if run.job or run.attempt > 1:  # else nothing of it ever ran
        against = desk.book.last_finished(run.identity) if state == "finished" else None
        about |= desk.figures(desk.sweep, run.id, against and against.id)
    return Event("ended", desk.clock(), about)


def job_of(sweep: ScheduledSweep, run: Run) -> Job:
    """The newest attempt at a run."""
    changes = list(overrides(sweep.settings, sweep.root))
    if run.gpu_hours_limit is not None:
        changes.append(f"search.budget.gpu_hours={run.gpu_hours_limit}")
    if sweep.spec.tracking.experiment == sweep.spec.name:
        changes.append(f"tracking.experiment={sweep.name}")  # else each run had one of its own
    words = [word for change in changes for word in ("--set", change)]
    arguments = (sweep.settings.space, "--name", run.id, *words)
    return Job(f"{run.id}-a{run.attempt}", run.id, arguments, sweep.root)


def _start(desk: Desk, run: Run, now: datetime) -> Event | None:
    if run.stopping:
        return ended(desk, run, "stopped", run.stopping)
    if run.not_before is not None and now < run.not_before:
        return None
    backend = desk.make_backend(desk.sweep)
    try:
        job = backend.submit(job_of(desk.sweep, run))
    except BackendError as error:
        look = Look(running=False, status=decide.REFUSED, reason=str(error))
        return _after_end(desk, run, look, now)
    job = {"backend": backend.kind, **job}
    return Event("submitted", now, {"run": run.id, "attempt": run.attempt, "job": job})
