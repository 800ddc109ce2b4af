"""The next event of a history: pure functions of a file, the book of its history, and the clock.

What is due: every time of the schedule after the last one that has a fate. Its fate is to be
started, skipped, or queued, once; of several that are due at once only the last one counts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from gdpo_tune.clusters import cron
from gdpo_tune.clusters.backends.base import Look
from gdpo_tune.clusters.book import Book, Run, RunState
from gdpo_tune.clusters.durations import shown
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.log import Event

ON_TIME = timedelta(minutes=10)
"""With `missed: skip`, how late a run may be: what calls `tick` may come every few minutes."""
TIME_IN_NAME = "%Y%m%dT%H%M%SZ"
REFUSED = 2
"""Exit status of a sweep that did not start: nothing was there to go on with."""
AFTER_REFUSAL = timedelta(minutes=10)
"""How long the next attempt waits then: a server that was away may be back."""


def run_name(name: str, tick: datetime) -> str:
    """The name of a run."""
    return f"{name}-{tick.astimezone(UTC).strftime(TIME_IN_NAME)}"


def fate(sweep: ScheduledSweep, book: Book, now: datetime) -> Event | None:
    """What happens by the schedule now; None if nothing does."""
    if (book.schedule or "") != sweep.schedule_in_force:
        return Event("seen", now, {"schedule": sweep.schedule_in_force})
    if book.queued is not None:
        return _fate_of_queued(sweep, book, book.queued, now) or _fate_of_due(sweep, book, now)
    return _fate_of_due(sweep, book, now)


def begins_after(book: Book) -> datetime | None:
    """After which instant times of the schedule have no fate yet; None if it was never seen.

    Where a clock that was ahead has been at work it lies in the future, and nothing is due.
    """
    if book.since is None or book.handled is None:
        return book.since
    return max(book.since, book.handled)


def begin(
    sweep: ScheduledSweep, book: Book, tick: datetime, now: datetime, *, asked: bool = False
) -> Event:
    """Start the run of a time, or take it up again; skip it if the 30 days' budget is spent.

    Args:
        sweep: the file.
        book: no run is under way.
        tick: the time.
        now: the clock.
        asked: whether somebody asked for it by name, not the schedule.
    """
    budget, known = sweep.settings.budget, book.run_for(tick)
    limit = budget.gpu_hours
    if budget.gpu_hours_per_30d is not None:
        spent = book.spent_until(now)
        left = budget.gpu_hours_per_30d - spent
        if left <= 0:
            why = f"{spent:.4g} of {budget.gpu_hours_per_30d:.4g} GPU-hours of 30 days are spent"
            return skipped(now, [tick], "budget", why, asked=asked)
        # of a run that is taken up again, what it has spent is spent already
        left += 0.0 if known is None else known.gpu_hours
        limit = left if limit is None else min(limit, left)
    limits = {} if limit is None else {"gpu_hours_limit": limit}
    if known is not None:
        about = {"run": known.id, "attempt": known.attempt + 1, "asked": True, **limits}
        return Event("retried", now, about)
    about = {
        "run": run_name(sweep.name, tick),
        "tick": tick.isoformat(),
        "identity": sweep.spec.identity(),
        **limits,
        **_by_name(asked),
    }
    return Event("started", now, about)


def overlapping(
    sweep: ScheduledSweep, book: Book, tick: datetime, now: datetime, *, asked: bool = False
) -> Event:
    """The fate of a time whose run would overlap with the one under way; `asked` as for `begin`."""
    active, policy = book.active, sweep.settings.policy.overlap
    assert active is not None, "nothing overlaps with no run"
    if policy == "skip":
        return skipped(now, [tick], "overlap", f"{active.id} is under way", asked=asked)
    if book.queued is not None and policy == "queue":
        waiting = run_name(sweep.name, book.queued)
        return skipped(now, [tick], "overlap", f"{waiting} is waiting already", asked=asked)
    if book.queued is not None:
        why = f"{run_name(sweep.name, tick)} takes its place"
        return skipped(now, [book.queued], "overlap", why, asked=asked)
    return Event("queued", now, {"tick": tick.isoformat(), **_by_name(asked)})


def overdue(sweep: ScheduledSweep, run: Run, now: datetime) -> bool:
    """Whether a run has lasted as long as it may, its retries included."""
    longest = sweep.settings.policy.max_runtime
    return longest is not None and now - run.began >= timedelta(seconds=longest)


def stop(sweep: ScheduledSweep, book: Book, run: Run, now: datetime) -> Event | None:
    """Why the run under way is to be stopped now; None if it is not, or was told already."""
    if run.stopping:
        return None
    why = ""
    if overdue(sweep, run, now):
        why = f"max_runtime = {shown(sweep.settings.policy.max_runtime or 0)} is over"
    elif book.queued is not None and sweep.settings.policy.overlap == "replace":
        why = f"{run_name(sweep.name, book.queued)} takes its place"
    return Event("stopping", now, {"run": run.id, "why": why}) if why else None


def after_end(sweep: ScheduledSweep, run: Run, look: Look) -> tuple[RunState, str]:
    """What a run is, now that its newest attempt has ended, and why.

    Returns:
        `starting` if there is to be another attempt.
    """
    if look.status == 0:
        return "finished", ""
    if run.stopping:
        return "stopped", run.stopping
    if run.attempt - run.before < sweep.settings.policy.max_attempts:
        return "starting", look.reason
    return "failed", look.reason


def retried(run: Run, look: Look, now: datetime) -> Event:
    """The next attempt at a run."""
    about: dict[str, Any] = {"run": run.id, "attempt": run.attempt + 1, "why": look.reason}
    if look.status == REFUSED:
        about["not_before"] = (now + AFTER_REFUSAL).isoformat()
    return Event("retried", now, about)


def skipped(
    now: datetime, ticks: list[datetime], why: str, reason: str, *, asked: bool = False
) -> Event:
    """The fate of times for which nothing is started.

    Args:
        now: the clock.
        ticks: the times, in order; of many only the ends are written down.
        why: `missed`, `overlap`, `budget` or `disabled`.
        reason: for a person.
        asked: whether somebody asked for them by name.
    """
    about = {
        "first": ticks[0].isoformat(),
        "last": ticks[-1].isoformat(),
        "count": len(ticks),
        "why": why,
        "reason": reason,
        **_by_name(asked),
    }
    return Event("skipped", now, about)


def _by_name(asked: bool) -> dict[str, bool]:
    """What an event says of a run that was asked for by name; nothing of any other."""
    return {"asked": True} if asked else {}


def _fate_of_queued(
    sweep: ScheduledSweep, book: Book, queued: datetime, now: datetime
) -> Event | None:
    if not sweep.settings.enabled:
        return skipped(now, [queued], "disabled", "the schedule was disabled")
    if book.active is not None:
        return None
    return begin(sweep, book, queued, now, asked=book.queued_by_name)


def _fate_of_due(sweep: ScheduledSweep, book: Book, now: datetime) -> Event | None:
    when, start = sweep.settings.schedule, begins_after(book)
    if when is None or not sweep.settings.enabled or start is None:
        return None
    due = [tick for tick in cron.between(when, start, now) if tick not in book.asked]
    covered = [tick for tick in due if book.asked and tick < max(book.asked)]
    if covered:
        return skipped(now, covered, "missed", "a later run was asked for by name")
    if not due:
        return None
    *earlier, latest = due
    policy = sweep.settings.policy
    grace = timedelta(seconds=policy.missed_grace) if policy.missed == "run_once" else ON_TIME
    if now - latest > grace:
        late = shown((now - latest).total_seconds())
        return skipped(
            now, due, "missed", f"{late} late, with a grace of {shown(grace.total_seconds())}"
        )
    if earlier:
        return skipped(now, earlier, "missed", f"{run_name(sweep.name, latest)} stands for all")
    if book.active is not None:
        return overlapping(sweep, book, latest, now)
    return begin(sweep, book, latest, now)
