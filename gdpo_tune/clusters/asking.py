"""Runs that somebody asks for by name: `run`, with or without waiting for the end, and `stop`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from gdpo_tune.clusters import cron, decide, notify
from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS
from gdpo_tune.clusters.book import ACTIVE, time_of
from gdpo_tune.clusters.log import Event
from gdpo_tune.clusters.tick import Desk, look_after
from gdpo_tune.core.errors import BackendError, UsageError

STATUS = {"finished": 0, "failed": 1, "skipped": 3, "budget": 4, "stopped": 5}
"""How a run ended, or why there is none -> exit status."""
EVERY = 10.0
"""Seconds between two looks at a run."""
LOOK_AGAIN = 0.5
"""The same, at a job that was asked to end."""


def time_asked_for(desk: Desk, at: datetime | None, *, now: bool) -> datetime:
    """The time whose run is meant: a given one, this second, or the schedule's last one.

    The last one makes a call that is repeated, after the machine that waited was lost, mean the
    same run.

    Raises:
        UsageError: the time has not come yet, or there is no schedule.
    """
    if at is not None and at - desk.clock() > decide.ON_TIME:
        # the schedule would take its run for a later one than all until then, and start none
        raise UsageError(
            f"--at {at.isoformat()}: that time has not come\n"
            "    fix: give a time that has, or --now"
        )
    if at is not None:
        return at
    clock, when = desk.clock().replace(microsecond=0), desk.sweep.settings.schedule
    if now:
        return clock
    latest = when and cron.latest(when, clock)
    if latest is None:
        raise UsageError(
            f"{desk.sweep.name} has no time that has come: it has no schedule, or a rare one\n"
            "    fix: give --now, or --at TIME, under which the run is found again"
        )
    return latest


def ask(desk: Desk, tick: datetime, *, once: bool = False, since: int | None = None) -> str:
    """See to it that the run of a time is under way, waiting or ended; it may be repeated.

    Args:
        desk: its schedule.
        tick: the time.
        once: whether a run that failed or was stopped stays so. Else it is taken up again.
        since: how many events there were when its run was still waiting, if it was: who has
            skipped it since then is not gainsaid.

    Returns:
        Why it was skipped, such as `overlap`, `budget` or `stopped`; empty if it was not.

    Raises:
        BackendError, BackendUnreachableError: no job would be taken now.
    """
    while True:
        look_after(desk)
        why = "" if since is None else skipped_since(desk, tick, since)
        if why:
            return why
        event = _next(desk, tick, once=once)
        if event is None:
            return ""
        if event.kind in ("started", "retried"):
            desk.make_backend(desk.sweep).check()
        count = len(desk.added)
        desk.append(event)
        ours = len(desk.added) > count
        if ours and event.kind == "skipped" and event.about["first"] == tick.isoformat():
            return str(event.about["why"])


def run(
    desk: Desk,
    tick: datetime,
    *,
    wait: bool,
    once: bool = False,
    every: float = EVERY,
    tell: Callable[[Desk], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run a sweep for a time; return the exit status.

    Args:
        desk: its schedule.
        tick: the time.
        wait: whether to stay until the run has ended.
        once: whether a run that failed or was stopped stays so.
        every: seconds between two looks.
        tell: called after each look, with what was added and what went wrong.
        sleep: how to wait.
    """
    why = ask(desk, tick, once=once)
    while not why:
        notify.tell(desk)
        tell(desk)
        found, waits = desk.book.run_for(tick), desk.book.queued == tick
        if found is not None and found.state not in ACTIVE and not waits:
            return STATUS[found.state]
        if not wait:
            return 0
        sleep(every)
        known = len(desk.log.events)
        desk.refresh()
        if waits:
            why = ask(desk, tick, once=once, since=known)
            continue
        try:
            look_after(desk)
        except BackendError as error:
            desk.trouble.append(error)  # what is under way is waited for, whatever is said of it
    notify.tell(desk)
    tell(desk)
    return STATUS.get(why, STATUS["skipped"])


def skipped_since(desk: Desk, tick: datetime, since: int) -> str:
    """Why a time was skipped by one of the events after the first `since`; empty if by none."""
    for event in desk.log.events[since:]:
        if event.kind == "skipped":
            first, last = (time_of(event.about[key]) for key in ("first", "last"))
            if first <= tick <= last:
                return str(event.about["why"])
    return ""


def stop(desk: Desk) -> bool:
    """Ask the run under way to end, and let none that waits begin; return whether there was any."""
    while True:
        now, book = desk.clock(), desk.book
        if book.queued is not None:
            desk.append(decide.skipped(now, [book.queued], "stopped", "stopped by name"))
        elif book.active is not None and not book.active.stopping:
            about = {"run": book.active.id, "why": "stopped by name"}
            desk.append(Event("stopping", now, about))
        else:
            break
    under_way = desk.book.active is not None
    look_after(desk)
    return under_way


def hand_back(desk: Desk, sleep: Callable[[float], None] = time.sleep) -> None:
    """Ask the job under way to end, and wait for its checkpoints, when its machine is taken away.

    Nothing is written down: for whoever calls next, the machine was lost, and the run goes on.
    """
    run = desk.book.active
    if run is None or run.state != "running":
        return
    backend, waited = desk.make_backend(desk.sweep), 0.0
    while waited < CHECKPOINT_SECONDS and backend.look(run.job).running:
        backend.stop(run.job, waited)
        sleep(LOOK_AGAIN)
        waited += LOOK_AGAIN


def _next(desk: Desk, tick: datetime, *, once: bool) -> Event | None:
    book, now = desk.book, desk.clock()
    run = book.run_for(tick)
    if run is not None and (run is book.active or run.state == "finished" or once):
        return None
    if book.active is None:
        return decide.begin(desk.sweep, book, tick, now, asked=True)
    if book.queued == tick:
        return None
    return decide.overlapping(desk.sweep, book, tick, now, asked=True)
