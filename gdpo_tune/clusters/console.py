"""Schedules in the terminal: what comes next, how runs stand, and what a tick has done."""

from __future__ import annotations

import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime

from gdpo_tune.clusters import cron
from gdpo_tune.clusters.book import ACTIVE, Book, Run, time_of
from gdpo_tune.clusters.decide import ON_TIME, begins_after, run_name
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.log import Event
from gdpo_tune.clusters.notify import words
from gdpo_tune.clusters.outcome import told

LOCAL = "%a %Y-%m-%d %H:%M %Z"
UNIVERSAL = "%Y-%m-%dT%H:%M:%SZ"
SILENT = ("seen", "told")
"""Events that are of interest to nobody who watches."""


def print_next(sweeps: Sequence[ScheduledSweep], after: datetime, count: int) -> None:
    """Print the next times of every schedule, by its own clock and in UTC."""
    rows: list[tuple[str, ...]] = []
    for sweep in sweeps:
        when = sweep.settings.schedule
        for tick in upcoming(sweep, after, count):
            assert when is not None, "a time without a schedule"
            local = tick.astimezone(zoneinfo.ZoneInfo(when.timezone)).strftime(LOCAL)
            rows.append((sweep.name, local, tick.strftime(UNIVERSAL)))
        if not sweep.schedule_in_force:
            rows.append((sweep.name, "disabled" if when else "no schedule", ""))
    print_columns(rows)


def print_status(sweep: ScheduledSweep, book: Book, now: datetime) -> None:
    """Print how the last run of a schedule stands, and what comes next."""
    limit = sweep.settings.budget.gpu_hours_per_30d
    spent = f"{book.spent_until(now):.4g}" + (f" of {limit:.4g}" if limit else "")
    start = begins_after(book) or now
    coming = [tick.strftime(UNIVERSAL) for tick in upcoming(sweep, max(start, now), 1)]
    rows = [("  next", coming[0] if coming else "not by a schedule")]
    if start - now > ON_TIME:
        why = f"a clock that was ahead has been here: no run by the schedule until {start:%F %T}"
        rows.append(("  held back", why))
    rows.append(("  GPU-hours of 30 days", spent))
    if book.queued is not None:
        rows.insert(0, ("  waits", run_name(sweep.name, book.queued)))
    for run in list(book.runs.values())[-1:]:
        rows.insert(0, ("  last run", f"{run.id}, attempt {run.attempt}: {state_of(run)}"))
        if what_of(run):
            rows.insert(1, ("", what_of(run)))
    print(sweep.name)
    print_columns(rows)


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows with equally wide columns, however wide the terminal is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def upcoming(sweep: ScheduledSweep, after: datetime, count: int) -> list[datetime]:
    """The next times of a schedule that is in force."""
    if sweep.settings.schedule is None or not sweep.schedule_in_force:
        return []
    times = cron.upcoming(sweep.settings.schedule, after)
    return [tick for tick, _ in zip(times, range(count), strict=False)]


def state_of(run: Run) -> str:
    """A run's state in a word or two."""
    if run.stopping and run.state in ACTIVE:
        return "stopping"
    return run.state


def what_of(run: Run) -> str:
    """What is to be said of a run's state."""
    if run.end is None or run.state in ACTIVE:
        return run.stopping
    return ". ".join(
        filter(None, [str(run.end.about.get("reason", "")), told(dict(run.end.about))])
    )


def line_of(name: str, event: Event) -> str:
    """An event as a line for whoever watches; empty if it is of no interest."""
    about = event.about
    if event.kind in SILENT:
        return ""
    match event.kind:
        case "ended" | "skipped":
            return words(name, event)
        case "started":
            return f"{about['run']} is started."
        case "retried":
            why = f": {about['why']}" if about.get("why") else ""
            later = f", not before {about['not_before']}" if "not_before" in about else ""
            return f"{about['run']} gets attempt {about['attempt']}{later}{why}."
        case "submitted":
            return f"{about['run']} runs, attempt {about['attempt']}."
        case "stopping":
            return f"{about['run']} is asked to stop: {about['why']}."
        case "queued":
            return f"{run_name(name, time_of(about['tick']))} waits."
        case _:
            return f"{name}: {about['why']}"


def print_events(name: str, events: Sequence[Event]) -> None:
    """Print a line for each event that is of interest, with its time."""
    for event in events:
        line = line_of(name, event)
        if line:
            print(f"{event.at.astimezone(UTC).strftime(UNIVERSAL)}  {line}", flush=True)
