"""Runs that a person or another scheduler asks for by name: `run`, with or without waiting, `stop`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS
from gdpo_tune.clusters.notify import send_notices
from gdpo_tune.clusters.schedule_context import ScheduleContext
from gdpo_tune.clusters.schedule_decisions import (
    ON_TIME,
    begin_run,
    request_stop,
    resolve_overlap,
    skip_times,
)
from gdpo_tune.clusters.schedule_state import ACTIVE, ScheduleEvent
from gdpo_tune.clusters.tick import look_after_run
from gdpo_tune.core.errors import BackendError, UsageError

EXIT_STATUS = {"finished": 0, "failed": 1, "skipped": 3, "budget": 4, "stopped": 5}
"""How a run ended, or why there is none -> exit status."""
POLL_SECONDS = 0.5
"""Between two looks at a job that was asked to end."""


def choose_due_time(context: ScheduleContext, at: datetime | None, *, now: bool) -> datetime:
    """Return the time whose run is meant: a given one, this second, or the schedule's last one.

    With the last one, a call that is repeated after its machine was lost means the same run.

    Raises:
        UsageError: the time lies in the future, or there is no schedule.
    """
    clock = context.clock()
    if at is not None and at - clock > ON_TIME:
        # the schedule would start no run for the times before it
        raise UsageError(
            f"--at {at.isoformat()}: that time has not come\n"
            "    fix: give a time in the past, or --now"
        )
    if at is not None:
        return at
    this_second, schedule = clock.replace(microsecond=0), context.sweep.settings.schedule
    if now:
        return this_second
    latest = schedule and schedule.last_time(this_second)
    if latest is None:
        raise UsageError(
            f"{context.sweep.name} has no past time: it has no schedule, or a rare one\n"
            "    fix: give --now, or --at TIME, under which the run is found again"
        )
    return latest


def request_run(
    context: ScheduleContext, due: datetime, *, once: bool = False, since: int | None = None
) -> str:
    """Make sure that the run of a time is active, queued or ended; repeating it changes nothing.

    Args:
        context: its schedule.
        due: the time.
        once: leave a run that failed or was stopped as it is, instead of resuming it.
        since: number of changes when the run was still queued, if it was: a later skip is final.

    Returns:
        Why it was skipped, such as `overlap`, `budget` or `stopped`; empty if it was not.

    Raises:
        BackendError, BackendUnreachableError: the backend would not take a job now.
    """
    while True:
        look_after_run(context)
        why = "" if since is None else _why_skipped(context, due, since)
        if why:
            return why
        event = _next_event(context, due, once=once)
        if event is None:
            return ""
        if context.record(event) and event.kind == "skipped":
            why = _why_skipped(context, due, context.state.number - 1)
            if why:
                return why


def run_by_name(
    context: ScheduleContext,
    due: datetime,
    *,
    wait: bool,
    once: bool = False,
    every: float = 10.0,
    report: Callable[[ScheduleContext], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run a sweep for a time; return the exit status.

    Args:
        context: its schedule.
        due: the time.
        wait: whether to stay until the run has ended.
        once: see `request_run`.
        every: seconds between two looks.
        report: called after each look.
        sleep: how to wait.
    """
    why = request_run(context, due, once=once)
    while not why:
        send_notices(context)
        report(context)
        run, queued = context.state.run_for(due), context.state.queued == due
        if run is not None and run.state not in ACTIVE and not queued:
            return EXIT_STATUS[run.state]
        if not wait:
            return 0
        sleep(every)
        since = context.state.number
        context.history.refresh()
        if queued:
            why = request_run(context, due, once=once, since=since)
            continue
        try:
            look_after_run(context)
        except BackendError as error:
            context.trouble.append(error)  # wait for an active run whatever its backend says
    send_notices(context)
    report(context)
    return EXIT_STATUS.get(why, EXIT_STATUS["skipped"])


def stop_by_name(context: ScheduleContext) -> bool:
    """Ask the active run to stop and skip a queued one; return whether a run was active."""
    while True:
        queued, run = context.state.queued, context.state.active
        if queued is not None:
            context.record(skip_times(context, [queued], "stopped", "stopped by name"))
        elif run is not None and not run.stop_reason:
            context.record(request_stop(run, context.clock(), "stopped by name"))
        else:
            break
    look_after_run(context)
    return run is not None


def hand_back_machine(
    context: ScheduleContext, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Ask the job on this machine to end, and wait for its checkpoints.

    Nothing is written down: for the next call the machine was lost, and the run goes on.
    """
    run = context.state.active
    job = run and run.job
    if job is None:
        return
    backend, waited = context.backend, 0.0
    while waited < CHECKPOINT_SECONDS and backend.poll(job).running:
        backend.stop(job, waited)
        sleep(POLL_SECONDS)
        waited += POLL_SECONDS


def _next_event(context: ScheduleContext, due: datetime, *, once: bool) -> ScheduleEvent | None:
    run, active = context.state.run_for(due), context.state.active
    if run is not None and (run is active or run.state == "finished" or once):
        return None
    if active is None:
        return begin_run(context, due, by_name=True)
    if context.state.queued == due:
        return None
    return resolve_overlap(context, active, due, by_name=True)


def _why_skipped(context: ScheduleContext, due: datetime, since: int) -> str:
    """Return why a time was skipped by a change after number `since`; empty if it was not."""
    for notice in context.state.notices:
        skipped = notice.skipped
        if notice.number > since and skipped and skipped[0] <= due <= skipped[1]:
            return notice.why
    return ""
