"""The next event of a schedule, by its file, its state and the clock.

Due is every time of the schedule after the last one that was handled. Each is handled once:
started, skipped or queued. If several are due at once, only the last one is started.

A function that decides something changes the state and returns the event. If there is nothing to
do, it changes nothing and returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from gdpo_tune.clusters.backends.base import Backend, build_backend
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.outcome import describe_figures, read_figures
from gdpo_tune.clusters.schedule_spec import format_duration
from gdpo_tune.clusters.schedule_state import (
    EndState,
    ScheduledRun,
    ScheduleEvent,
    ScheduleHistory,
    ScheduleState,
)
from gdpo_tune.clusters.schedule_storage import ScheduleStorage
from gdpo_tune.core.errors import GdpoTuneError

ON_TIME = timedelta(minutes=10)
"""Delay allowed under `missed: skip`: `tick` may be called only every few minutes."""
AFTER_REFUSAL = timedelta(minutes=10)
"""Pause before the next attempt after a refusal: a server may answer again by then."""

Clock = Callable[[], datetime]
"""The time in UTC."""


@dataclass
class ScheduleContext:
    """Everything that decisions about one schedule use: file, state, backend, and a clock."""

    sweep: ScheduledSweep
    history: ScheduleHistory
    clock: Clock
    build_backend: Callable[[ScheduledSweep], Backend] = build_backend
    read_figures: Callable[[ScheduledSweep, str, str | None], dict[str, Any]] = read_figures
    events: list[ScheduleEvent] = field(default_factory=list[ScheduleEvent])
    """Changes that this process made."""
    backend_errors: list[GdpoTuneError] = field(default_factory=list[GdpoTuneError])
    """Why something could not be done now: a backend did not answer."""

    @property
    def state(self) -> ScheduleState:
        """The state as it was last read or written."""
        return self.history.state

    @property
    def backend(self) -> Backend:
        """The backend that the file names."""
        return self.build_backend(self.sweep)

    def record(self, event: ScheduleEvent) -> bool:
        """Write the changed state; if another process was first, take its state, return False."""
        saved = self.history.save()
        self.events += [event] if saved else []
        return saved

    def name_run(self, due: datetime) -> str:
        """Return the name of the run for a time."""
        return f"{self.sweep.name}-{due.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def open_context(
    sweep: ScheduledSweep, clock: Clock, *, read_only: bool = False
) -> ScheduleContext:
    """Read the state of a schedule; refuse a new one where no state could be written."""
    storage = ScheduleStorage(sweep.storage)
    context = ScheduleContext(sweep, ScheduleHistory(storage, sweep.name), clock)
    context.history.refresh()
    if not context.state.number and not read_only:
        storage.check()
    return context


def next_schedule_event(context: ScheduleContext) -> ScheduleEvent | None:
    """Take the next decision of the schedule; return None if nothing is due."""
    sweep, state, now = context.sweep, context.state, context.clock()
    if (state.schedule or "") != sweep.schedule_in_force:
        state.schedule, state.since = sweep.schedule_in_force, now
        return ScheduleEvent("seen", now)
    if state.queued is not None:
        queued, by_name = state.queued, state.queued_by_name
        if not sweep.settings.enabled:
            reason = "the schedule was disabled"
            return skip_times(context, [queued], "disabled", reason, by_name=by_name)
        if state.active is None:
            return begin_run(context, queued, by_name=by_name)
    schedule, policy, start = sweep.settings.schedule, sweep.settings.policy, state.due_after
    if schedule is None or not sweep.settings.enabled or start is None:
        return None
    due = schedule.list_times(start, now)
    named = {run.due for run in state.runs if run.by_name} if due else set[datetime]()
    due = [time for time in due if time not in named]
    covered = [time for time in due if named and time < max(named)]
    if covered:
        return skip_times(context, covered, "missed", "a later run was started by name")
    if not due:
        return None
    *earlier, latest = due
    grace = timedelta(seconds=policy.missed_grace) if policy.missed == "run_once" else ON_TIME
    if now - latest > grace:
        late, allowed = (format_duration(d.total_seconds()) for d in (now - latest, grace))
        return skip_times(context, due, "missed", f"{late} late, {allowed} allowed")
    if earlier:
        reason = f"{context.name_run(latest)} replaces all of them"
        return skip_times(context, earlier, "missed", reason)
    if state.active is not None:
        return resolve_overlap(context, state.active, latest)
    return begin_run(context, latest)


def begin_run(context: ScheduleContext, due: datetime, *, by_name: bool = False) -> ScheduleEvent:
    """Start or resume the run of a time; skip it if the 30 days' budget is spent.

    `by_name`, here and below: `run` starts it, not the schedule. No run is active. A
    backend that would not take a job now raises its error before anything is changed.
    """
    state, now, budget = context.state, context.clock(), context.sweep.settings.budget
    run, limit = state.find_run(due), budget.gpu_hours
    if budget.gpu_hours_per_30d is not None:
        spent = state.sum_gpu_hours(now)
        left = budget.gpu_hours_per_30d - spent
        if left <= 0:
            reason = f"{spent:.4g} of {budget.gpu_hours_per_30d:.4g} GPU-hours of 30 days are spent"
            return skip_times(context, [due], "budget", reason, by_name=by_name)
        left += run.gpu_hours if run else 0.0  # a resumed run has spent these already
        limit = left if limit is None else min(limit, left)
    context.backend.check()
    if state.queued == due:
        state.queued = None
    if not by_name:
        state.handle(due)
    if run is not None:
        run.began, run.earlier_attempts, run.gpu_hours_limit = now, run.attempt, limit
        state.add_run(run)
        return retry_run(run, now)
    name, identity = context.name_run(due), context.sweep.spec.compute_identity()
    run = ScheduledRun(name=name, due=due, identity=identity, began=now, by_name=by_name)
    run.gpu_hours_limit = limit
    state.add_run(run)
    return ScheduleEvent("started", now, f"{name} is started.")


def resolve_overlap(
    context: ScheduleContext, active: ScheduledRun, due: datetime, *, by_name: bool = False
) -> ScheduleEvent:
    """Skip or queue a time whose run would overlap with the active one."""
    state, policy = context.state, context.sweep.settings.policy.overlap
    skipped, reason = due, ""
    if policy == "skip":
        reason = f"{active.name} is active"
    elif state.queued is not None and policy == "queue":
        reason = f"{context.name_run(state.queued)} is queued already"
    elif state.queued is not None:
        reason = f"{context.name_run(due)} replaces it"
        skipped, by_name = state.queued, state.queued_by_name
    if reason:
        return skip_times(context, [skipped], "overlap", reason, by_name=by_name)
    state.queued, state.queued_by_name = due, by_name
    if not by_name:
        state.handle(due)
    return ScheduleEvent("queued", context.clock(), f"{context.name_run(due)} is queued.")


def skip_times(
    context: ScheduleContext,
    times: Sequence[datetime],
    why: str,
    reason: str,
    *,
    by_name: bool = False,
) -> ScheduleEvent:
    """Start no run for some times in order, and add a notice.

    `why` is `missed`, `overlap`, `budget`, `disabled` or `stopped`, `reason` the same for a person.
    """
    state, now, first, last = context.state, context.clock(), times[0], times[-1]
    if state.queued in times:
        state.queued = None
    if not by_name:
        state.handle(last)
    runs = context.name_run(first)
    if len(times) > 1:
        runs = f"{len(times)} runs from {runs} to {context.name_run(last)}"
    text = f"{runs} skipped ({why}): {reason}."
    details = {"first": first.isoformat(), "last": last.isoformat(), "count": len(times)}
    details |= {"why": why, "reason": reason}
    notice = state.add_notice(now, "budget" if why == "budget" else "skipped", text, details)
    notice.skipped, notice.why = (first, last), why
    return ScheduleEvent("skipped", now, text)


def stop_if_needed(context: ScheduleContext, run: ScheduledRun) -> ScheduleEvent | None:
    """Ask the active run to stop if its time is over, or if a queued run replaces it."""
    policy, queued, now = context.sweep.settings.policy, context.state.queued, context.clock()
    if run.stop_reason:
        return None
    if policy.max_runtime and now - run.began >= timedelta(seconds=policy.max_runtime):
        longest = format_duration(policy.max_runtime)
        return request_stop(run, now, f"max_runtime = {longest} is over")
    if queued is not None and policy.overlap == "replace":
        return request_stop(run, now, f"{context.name_run(queued)} replaces it")
    return None


def request_stop(run: ScheduledRun, now: datetime, reason: str) -> ScheduleEvent:
    """Note that a run is to stop."""
    run.stop_reason, run.stop_since = reason, now
    return ScheduleEvent("stopping", now, f"{run.name} is asked to stop: {reason}.")


def retry_run(
    run: ScheduledRun, now: datetime, reason: str = "", *, refused: bool = False
) -> ScheduleEvent:
    """Begin the next attempt at a run; after a refusal only after a pause."""
    run.attempt += 1
    run.state, run.job, run.stop_reason, run.stop_since = "starting", None, "", None
    run.unknown = ""
    run.not_before = now + AFTER_REFUSAL if refused else None
    later = f", not before {run.not_before:%FT%TZ}" if run.not_before else ""
    because = f": {reason}" if reason else ""
    return ScheduleEvent("retried", now, f"{run.name} gets attempt {run.attempt}{later}{because}.")


def end_run(
    context: ScheduleContext,
    run: ScheduledRun,
    end_state: EndState,
    reason: str,
    exit_status: int | None,
) -> ScheduleEvent:
    """Note the end of the active run with its figures, and add a notice.

    `reason` is empty if it finished; `exit_status` is None if it is unknown.
    """
    state, figures = context.state, dict[str, Any]()
    if run.job or run.attempt > 1:  # otherwise it has never run
        same = (each for each in reversed(state.runs) if each.identity == run.identity)
        earlier = next((each.name for each in same if each.state == "finished"), None)
        compared = earlier if end_state == "finished" else None
        figures = context.read_figures(context.sweep, run.name, compared)
    # an unreadable ledger counts with all that the run may have spent
    unread = run.gpu_hours_limit if "unknown" in figures else None
    hours, now = float(figures.get("gpu_hours", unread or 0.0)), context.clock()
    run.spent.append((now, max(0.0, hours - run.gpu_hours)))
    description = describe_figures(figures)
    run.state, run.unknown = end_state, ""
    run.summary = ". ".join(filter(None, [reason, description]))
    details: dict[str, Any] = {"run": run.name, "attempt": run.attempt, "state": end_state}
    details |= {"reason": reason} if reason else {}
    details |= {"status": exit_status} if exit_status is not None else {}
    because = f": {reason}" if reason else ""
    text = f"{run.name} {end_state}{because}. {description}".rstrip()
    state.add_notice(now, end_state, text, details | figures)
    return ScheduleEvent("ended", now, text)
