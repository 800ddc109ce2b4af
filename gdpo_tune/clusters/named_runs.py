"""Runs that a person or another scheduler starts or stops by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime

from gdpo_tune.clusters import schedule_decisions as decisions
from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS
from gdpo_tune.clusters.notify import send_notices
from gdpo_tune.clusters.schedule_decisions import ScheduleContext
from gdpo_tune.clusters.schedule_state import ACTIVE, ScheduleEvent
from gdpo_tune.clusters.tick import advance_active_run
from gdpo_tune.core.errors import BackendError, UsageError

EXIT_STATUS = {"finished": 0, "failed": 1, "skipped": 3, "budget": 4, "stopped": 5}
"""How a run ended, or why there is none -> exit status."""
POLL_SECONDS = 0.5
"""Interval between polls of a job that was asked to end."""


def choose_due_time(context: ScheduleContext, at: datetime | None, *, now: bool) -> datetime:
    """Return the time of the run to start: a given one, this second, or the schedule's last one.

    With the last one, a call that is repeated after its machine was lost finds the same run.

    Raises:
        UsageError: the time lies in the future, or there is no schedule.
    """
    clock, schedule = context.clock(), context.sweep.settings.schedule
    if at is not None and at - clock > decisions.ON_TIME:
        # the schedule would start no run for the times before it
        raise UsageError(
            f"--at {at.isoformat()}: that time has not come\n"
            "    fix: give a time in the past, or --now"
        )
    due = at or (clock if now else schedule and schedule.find_last_time(clock))
    if due is None:
        raise UsageError(
            f"{context.sweep.name} has no past time: it has no schedule, or a rare one\n"
            "    fix: give --now, or --at TIME, under which the run is found again"
        )
    return due.replace(microsecond=0)


def run_by_name(
    context: ScheduleContext,
    due: datetime,
    *,
    wait: bool,
    once: bool = False,
    every: float = 10.0,
    report: Callable[[ScheduleContext], None] = lambda _: None,
    taken_back: threading.Event | None = None,
) -> int:
    """Run a sweep for a time; return the exit status. Repeating the call changes nothing.

    With `wait` it polls every `every` seconds until the run has ended. With `once` a run that
    failed or was stopped is not resumed. `report` is called after each poll. `taken_back` is set
    when another scheduler takes this machine back.

    Raises:
        KeyboardInterrupt: the machine was taken back; the job has ended as by Ctrl-C.
        BackendError, BackendUnreachableError: the backend would not take a job now.
    """
    since: int | None = None
    while True:
        why = ""
        try:
            why = _request_run(context, due, since, once=once)
        except BackendError as error:
            if since is None or context.state.active is None:
                raise
            context.backend_errors.append(error)  # an active run continues nevertheless
        send_notices(context)
        report(context)
        run = context.state.find_run(due)
        if why:
            return EXIT_STATUS.get(why, EXIT_STATUS["skipped"])
        if run is not None and run.state not in ACTIVE and context.state.queued != due:
            return EXIT_STATUS[run.state]
        if not wait:
            return 0
        if taken_back is None:
            time.sleep(every)
        elif taken_back.wait(every):
            # nothing is recorded: the next call treats the machine as lost, and resumes the run
            run, waited = context.state.active, 0.0
            job = run and run.job
            while job and waited < CHECKPOINT_SECONDS and context.backend.poll(job).running:
                context.backend.stop(job, waited)
                time.sleep(POLL_SECONDS)
                waited += POLL_SECONDS
            raise KeyboardInterrupt
        since, once = context.state.number, True
        context.history.refresh()


def stop_by_name(context: ScheduleContext) -> bool:
    """Ask the active run to stop and skip a queued one; return whether a run was active."""
    while True:
        queued, run = context.state.queued, context.state.active
        if queued is not None:
            why, by_name = ("stopped", "stopped by name"), context.state.queued_by_name
            context.record(decisions.skip_times(context, [queued], *why, by_name=by_name))
        elif run is not None and not run.stop_reason:
            context.record(decisions.request_stop(run, context.clock(), "stopped by name"))
        else:
            break
    advance_active_run(context)
    return run is not None


def _request_run(context: ScheduleContext, due: datetime, since: int | None, *, once: bool) -> str:
    """Make sure that the run of a time is active, queued or ended.

    Returns:
        Why it was skipped here, or by any process after change number `since`; empty if it was not.
    """
    while True:
        advance_active_run(context)
        newer = (n for n in context.state.notices if since is not None and n.number > since)
        why = next((n.why for n in newer if n.skipped and n.skipped[0] <= due <= n.skipped[1]), "")
        event = None if why else _decide_named_run(context, due, once=once)
        if event is None:
            return why
        if context.record(event):
            since = context.state.number - 1
            once = once or event.kind in ("started", "retried")


def _decide_named_run(
    context: ScheduleContext, due: datetime, *, once: bool
) -> ScheduleEvent | None:
    run, active, queued = context.state.find_run(due), context.state.active, context.state.queued
    has_ended = run is not None and (run.state == "finished" or once)
    if run is not None and (run is active or (has_ended and queued != due)):
        return None
    if active is None:
        return decisions.begin_run(context, due, by_name=True)
    return None if queued == due else decisions.resolve_overlap(context, active, due, by_name=True)
