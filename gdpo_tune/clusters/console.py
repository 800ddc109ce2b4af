"""Schedules in the terminal: checks, ticks of many sweeps, the next times, the state of runs."""

from __future__ import annotations

import itertools
import os
import sys
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime

from gdpo_tune.clusters.backends.base import build_backend
from gdpo_tune.clusters.backends.submit import explain_lost_tracking
from gdpo_tune.clusters.load_schedules import LoadedSweeps, ScheduledSweep, load_sweeps
from gdpo_tune.clusters.schedule_spec import KubeRayBackend, LocalBackend, RayJobBackend
from gdpo_tune.clusters.schedule_state import ACTIVE, ScheduleHistory
from gdpo_tune.clusters.scheduler import TICK_TOLERANCE, Clock, SweepScheduler
from gdpo_tune.core import addresses
from gdpo_tune.core.errors import GdpoTuneError, SpecError, StoreError
from gdpo_tune.core.files import find_write_problem
from gdpo_tune.core.http import find_webhook_problem
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.text import align_columns
from gdpo_tune.ledger.sweep_store import check_store_writable
from gdpo_tune.spec.machine import find_machine_problems, find_unset_webhook

UTC_TIME = "%Y-%m-%dT%H:%M:%SZ"
SweepErrors = Sequence[tuple[ScheduledSweep, GdpoTuneError]]


class ConsolePrinter:
    """Prints changes, and on stderr those messages that the last tick did not have."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def print_errors(self, loaded: LoadedSweeps, errors: SweepErrors = ()) -> int:
        """Print the errors of sweeps and of files; return the exit status.

        The status of a user's mistake comes before that of an outage.
        """
        messages = [f"{sweep.file}: {error}" for sweep, error in errors]
        statuses = [error.exit_status for _, error in errors]
        if loaded.error is not None:
            messages.append(str(loaded.error))
            statuses.append(loaded.error.exit_status)
        self.print_messages("error", messages)
        return min(statuses, default=0)

    def print_messages(self, kind: str, messages: Sequence[str]) -> None:
        """Print those messages that are new, as errors or warnings."""
        for message in dict.fromkeys(messages):
            if message not in self._printed:
                print(f"{kind}: {message}", file=sys.stderr, flush=True)
        self._printed = set(messages)

    def print_news(self, scheduler: SweepScheduler) -> None:
        """Print the changes and errors since the last call."""
        print_events(scheduler)
        self.print_messages("warning", [str(error) for error in scheduler.backend_errors])
        scheduler.events, scheduler.backend_errors = [], []


def tick_sweeps(directory: str, clock: Clock, printer: ConsolePrinter) -> int:
    """Tick every sweep of a directory once; return the exit status."""
    try:
        loaded = load_sweeps(directory)
    except GdpoTuneError as error:
        printer.print_messages("error", [str(error)])
        return error.exit_status
    errors: list[tuple[ScheduledSweep, GdpoTuneError]] = []
    for sweep in loaded.sweeps:
        try:
            scheduler = SweepScheduler.open(sweep, clock)
            try:
                scheduler.tick()
            finally:
                print_events(scheduler)
            errors += [(sweep, error) for error in scheduler.backend_errors]
        except GdpoTuneError as error:  # it does not stop other sweeps
            errors.append((sweep, error))
        except OSError as error:
            errors.append((sweep, GdpoTuneError(str(error))))
    return printer.print_errors(loaded, errors)


def find_errors(sweep: ScheduledSweep) -> list[GdpoTuneError]:
    """Return the errors of a sweep's storage and backend, as this machine sees them now.

    Where this machine trains, they include the data and packages that it lacks.
    """
    errors: list[GdpoTuneError] = []
    if isinstance(sweep.settings.backend, LocalBackend):
        errors += [SpecError((need,)) for need in sweep.needs]
        errors += [*find_machine_problems(sweep.spec), *find_unset_webhook(sweep.spec)]
    for check in (lambda: _check_storage(sweep), lambda: build_backend(sweep).check()):
        try:
            check()
        except GdpoTuneError as error:
            errors.append(error)
    return errors


def _check_storage(sweep: ScheduledSweep) -> None:
    if is_url(sweep.storage):
        check_store_writable(sweep.storage)
    if problem := find_write_problem(sweep.state_directory):
        raise StoreError(
            f"{sweep.state_directory}: {problem}\n    fix: name another directory with storage:"
        )
    ScheduleHistory(sweep.state_directory).read()


def find_warnings(sweep: ScheduledSweep) -> list[str]:
    """Return what is allowed but probably a mistake in an enabled sweep."""
    if not sweep.settings.enabled:
        return []
    warnings: list[str] = []
    notify, backend = sweep.settings.notify, sweep.settings.backend
    if notify is not None:
        problem = find_webhook_problem(os.environ.get(notify.webhook_env, ""))
        if problem:
            text = f"{notify.webhook_env} is {problem}, so no notification would be sent"
            warnings.append(f"{sweep.file}: {text}")
    if isinstance(backend, LocalBackend) and (address := os.environ.get(addresses.RAY_ADDRESS)):
        warnings.append(f"{sweep.file}: {addresses.RAY_ADDRESS} = {address}: trials run there")
    lost = explain_lost_tracking(sweep.spec)
    if lost and isinstance(backend, RayJobBackend | KubeRayBackend):
        warnings.append(f"{sweep.file}: {lost}; write tracking: and the URL of a server")
    return warnings


def find_notes(sweeps: Sequence[ScheduledSweep]) -> list[str]:
    """Return the data and packages that other machines need and this one lacks, each once."""
    users: dict[str, list[str]] = {}
    for sweep in sweeps:
        if not isinstance(sweep.settings.backend, LocalBackend):
            problems = find_machine_problems(sweep.spec, size=False)
            for need in (*sweep.needs, *problems, *find_unset_webhook(sweep.spec)):
                users.setdefault(str(need), []).append(sweep.name)
    where = "needed on the machine that trains, and missing on this one"
    return [f"{', '.join(names)}: {where}: {need}" for need, names in users.items()]


def print_events(scheduler: SweepScheduler) -> None:
    """Print a line with its time for each change that a person may want to know."""
    for event in scheduler.events:
        if event.text:
            print(f"{event.at.astimezone(UTC).strftime(UTC_TIME)}  {event.text}", flush=True)


def print_next(sweeps: Sequence[ScheduledSweep], after: datetime, count: int) -> None:
    """Print the next times of every schedule, in its own time zone and in UTC."""
    rows: list[tuple[str, ...]] = []
    for sweep in sweeps:
        schedule = sweep.settings.schedule
        if schedule is not None:
            zone = zoneinfo.ZoneInfo(schedule.timezone)
            for time in _list_next_times(sweep, after, count):
                local = time.astimezone(zone).strftime("%a %Y-%m-%d %H:%M %Z")
                rows.append((sweep.name, local, time.strftime(UTC_TIME)))
        if not sweep.active_schedule:
            rows.append((sweep.name, "disabled" if schedule else "no schedule", ""))
    for line in align_columns(rows):
        print(line)


def print_status(scheduler: SweepScheduler) -> None:
    """Print the last run of a schedule, and what comes next."""
    sweep, state, now = scheduler.sweep, scheduler.state, scheduler.clock()
    rows: list[tuple[str, str]] = []
    for run in state.runs[-1:]:
        is_active = run.state in ACTIVE
        word = "stopping" if is_active and run.stop_reason else run.state
        word = f"unknown ({word})" if run.state_problem else word
        rows.append(("  last run", f"{run.name}, attempt {run.attempt}: {word}"))
        reasons = (run.state_problem, run.stop_reason) if is_active else (run.summary,)
        rows += [("", reason) for reason in reasons if reason]
    if state.queued is not None:
        rows.append(("  queued", scheduler.name_run(state.queued)))
    start = state.due_after or now
    times = [time.strftime(UTC_TIME) for time in _list_next_times(sweep, max(start, now), 1)]
    rows.append(("  next", times[0] if times else "not by a schedule"))
    if start - now > TICK_TOLERANCE:
        reason = f"the clock was ahead earlier: no run by the schedule until {start:%F %T}"
        rows.append(("  held back", reason))
    limit, spent = sweep.settings.budget.gpu_hours_per_30d, f"{state.sum_gpu_hours(now):.4g}"
    rows.append(("  GPU-hours of 30 days", spent + (f" of {limit:.4g}" if limit else "")))
    print(sweep.name)
    for line in align_columns(rows):
        print(line)


def _list_next_times(sweep: ScheduledSweep, after: datetime, count: int) -> list[datetime]:
    schedule = sweep.settings.schedule
    if schedule is None or not sweep.active_schedule:
        return []
    return list(itertools.islice(schedule.iterate_times(after), count))
