"""Schedules in the terminal: the next times, the state of runs, and what a tick has done."""

from __future__ import annotations

import sys
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_context import ScheduleContext
from gdpo_tune.clusters.schedule_decisions import ON_TIME
from gdpo_tune.clusters.schedule_state import ACTIVE, ScheduledRun

LOCAL_TIME = "%a %Y-%m-%d %H:%M %Z"
UTC_TIME = "%Y-%m-%dT%H:%M:%SZ"


def print_next(sweeps: Sequence[ScheduledSweep], after: datetime, count: int) -> None:
    """Print the next times of every schedule, in its own time zone and in UTC."""
    rows: list[tuple[str, ...]] = []
    for sweep in sweeps:
        schedule = sweep.settings.schedule
        for time in _next_times(sweep, after, count):
            assert schedule is not None, "a time without a schedule"
            local = time.astimezone(zoneinfo.ZoneInfo(schedule.timezone)).strftime(LOCAL_TIME)
            rows.append((sweep.name, local, time.strftime(UTC_TIME)))
        if not sweep.schedule_in_force:
            rows.append((sweep.name, "disabled" if schedule else "no schedule", ""))
    _print_columns(rows)


def print_status(context: ScheduleContext) -> None:
    """Print the last run of a schedule, and what comes next."""
    sweep, state, now = context.sweep, context.state, context.clock()
    limit = sweep.settings.budget.gpu_hours_per_30d
    spent = f"{state.gpu_hours_spent(now):.4g}" + (f" of {limit:.4g}" if limit else "")
    start = state.due_after or now
    times = [time.strftime(UTC_TIME) for time in _next_times(sweep, max(start, now), 1)]
    rows = [("  next", times[0] if times else "not by a schedule")]
    if start - now > ON_TIME:
        reason = f"the clock was ahead earlier: no run by the schedule until {start:%F %T}"
        rows.append(("  held back", reason))
    rows.append(("  GPU-hours of 30 days", spent))
    if state.queued is not None:
        rows.insert(0, ("  queued", context.run_name(state.queued)))
    if state.runs:
        run, summary = state.runs[-1], _summarize(state.runs[-1])
        is_stopping = run.stop_reason and run.state in ACTIVE
        word = "stopping" if is_stopping else run.state
        last = [("  last run", f"{run.name}, attempt {run.attempt}: {word}")]
        rows = [*last, *([("", summary)] if summary else []), *rows]
    print(sweep.name)
    _print_columns(rows)


def print_events(context: ScheduleContext) -> None:
    """Print a line with its time for each change that a person may want to know."""
    for event in context.events:
        if event.text:
            print(f"{event.at.astimezone(UTC).strftime(UTC_TIME)}  {event.text}", flush=True)


class Reporter:
    """Prints what is new after each look at a run."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def print_news(self, context: ScheduleContext) -> None:
        """Print new changes, and each trouble once."""
        print_events(context)
        for error in context.trouble:
            if str(error) not in self._printed:
                print(f"warning: {error}", file=sys.stderr, flush=True)
            self._printed.add(str(error))
        context.events, context.trouble = [], []


def _summarize(run: ScheduledRun) -> str:
    return run.stop_reason if run.state in ACTIVE else run.summary


def _next_times(sweep: ScheduledSweep, after: datetime, count: int) -> list[datetime]:
    if sweep.settings.schedule is None or not sweep.schedule_in_force:
        return []
    times = sweep.settings.schedule.times_after(after)
    return [time for time, _ in zip(times, range(count), strict=False)]


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows with equally wide columns, however wide the terminal is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
