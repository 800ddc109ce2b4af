"""What the events of a history add up to: runs, the fate of every time, and what was spent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from gdpo_tune.clusters.log import Event

RunState = Literal["starting", "running", "finished", "failed", "stopped"]
ACTIVE: tuple[RunState, ...] = ("starting", "running")
"""States of a run that has not ended."""
MONTH = timedelta(days=30)


@dataclass
class Run:
    """One sweep that a schedule has begun."""

    id: str
    tick: datetime
    """The time that it is for."""
    identity: str
    """Of its sweep's spec: runs of one identity can be compared."""
    began: datetime
    """When it was started, or taken up again by `run` after its end."""
    gpu_hours_limit: float | None = None
    """Most GPU-hours that it may spend, over all its attempts."""
    attempt: int = 1
    before: int = 0
    """Attempts before it was taken up again, which do not count any more."""
    state: RunState = "starting"
    """`starting`: claimed, but no backend is known to have it yet."""
    not_before: datetime | None = None
    """When the newest attempt may be submitted; None: at once."""
    job: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the backend knows its newest attempt by."""
    submitted: int = 0
    """Number of the event that says so."""
    stopping: str = ""
    """Why it was told to stop, if it was."""
    stopping_since: datetime | None = None
    gpu_hours: float = 0.0
    """Spent, as far as it is known."""
    end: Event | None = None
    """Of its newest attempt that ended."""


@dataclass
class Book:
    """Everything that a decision rests on."""

    schedule: str | None = None
    """The schedule as `tick` last saw it; empty: disabled or none, None: never seen."""
    since: datetime | None = None
    """When it was first seen so: no earlier time of it is due."""
    handled: datetime | None = None
    """The latest time of the schedule that has a fate; all before it have one."""
    asked: set[datetime] = field(default_factory=set[datetime])
    """Times for which `run` has started runs."""
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    """By name, in the order in which they were started."""
    active: Run | None = None
    """The run under way; there is one at most."""
    queued: datetime | None = None
    """The time whose run waits for the one under way to end."""
    queued_by_name: bool = False
    """Whether `run` has asked for it, not the schedule."""
    news: dict[int, Event] = field(default_factory=dict[int, Event])
    """Number -> event that nobody was told of so far, and somebody may want to hear of."""
    untold: set[int] = field(default_factory=set[int])
    """Numbers of those of them that could not be told at the first try."""
    spent: list[tuple[datetime, float]] = field(default_factory=list[tuple[datetime, float]])
    """GPU-hours, and when they were known."""
    count: int = 0
    """Events so far."""

    def run_for(self, tick: datetime) -> Run | None:
        """The run of a time."""
        return next((run for run in reversed(self.runs.values()) if run.tick == tick), None)

    def last_finished(self, identity: str) -> Run | None:
        """The newest finished run of a spec."""
        runs = (run for run in reversed(self.runs.values()) if run.state == "finished")
        return next((run for run in runs if run.identity == identity), None)

    def spent_until(self, now: datetime) -> float:
        """GPU-hours of the last 30 days."""
        # what is noted of later, by a clock that was ahead, was spent all the same
        return sum(hours for at, hours in self.spent if now - MONTH < at)

    def apply_all(self, events: Iterable[Event]) -> None:
        """Take in the next events.

        Raises:
            ValueError: one of them does not fit to those before it, or lacks something.
        """
        for event in events:
            try:
                self.apply(event)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{event.kind}: {error}") from error

    def apply(self, event: Event) -> None:
        """Take in the next event."""
        self.count += 1
        about = event.about
        match event.kind:
            case "seen":
                self.schedule, self.since = str(about["schedule"]), event.at
            case "started":
                self._start(event)
            case "retried":
                self._retry(event)
            case "submitted":
                run = self.runs[about["run"]]
                run.state, run.job, run.submitted = "running", dict(about["job"]), self.count
            case "stopping":
                run = self.runs[about["run"]]
                run.stopping, run.stopping_since = str(about["why"]), event.at
            case "ended":
                self._end(event)
            case "queued":
                self.queued = time_of(about["tick"])
                self.queued_by_name = bool(about.get("asked"))
                self._settle(event, self.queued)
            case "skipped":
                self._skip(event)
            case "told":
                self.news.pop(int(about["of"]), None)
                self.untold.discard(int(about["of"]))
            case "untold":
                self.untold.add(int(about["of"]))

    def _start(self, event: Event) -> None:
        tick, name = time_of(event.about["tick"]), str(event.about["run"])
        limit = event.about.get("gpu_hours_limit")
        self.active = Run(name, tick, str(event.about["identity"]), event.at, limit)
        self.runs[name] = self.active
        if event.about.get("asked"):
            self.asked.add(tick)
        self._settle(event, tick)

    def _retry(self, event: Event) -> None:
        run = self.runs[event.about["run"]]
        if event.about.get("asked"):
            run.began, run.before = event.at, run.attempt
        run.attempt = int(event.about["attempt"])
        run.state, run.job = "starting", {}
        run.stopping, run.stopping_since = "", None
        wait = event.about.get("not_before")
        run.not_before = None if wait is None else time_of(wait)
        run.gpu_hours_limit = event.about.get("gpu_hours_limit", run.gpu_hours_limit)
        self.active = run

    def _end(self, event: Event) -> None:
        run = self.runs[event.about["run"]]
        run.state, run.end = event.about["state"], event
        # of what nobody can read, all that it might have spent
        unread = run.gpu_hours_limit if "unknown" in event.about else None
        hours = float(event.about.get("gpu_hours", unread or 0.0))
        self.spent.append((event.at, max(0.0, hours - run.gpu_hours)))
        run.gpu_hours = max(hours, run.gpu_hours)
        self.active = None
        self.news[self.count] = event

    def _skip(self, event: Event) -> None:
        first, last = time_of(event.about["first"]), time_of(event.about["last"])
        if self.queued is not None and first <= self.queued <= last:
            self.queued = None
        self._settle(event, last)
        self.news[self.count] = event

    def _settle(self, event: Event, tick: datetime) -> None:
        """A time has a fate."""
        if event.kind != "queued" and self.queued == tick:
            self.queued = None
        if not event.about.get("asked"):
            self.handled = tick if self.handled is None else max(self.handled, tick)


def time_of(text: object) -> datetime:
    """A time of an event."""
    return datetime.fromisoformat(str(text))
