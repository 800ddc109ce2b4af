"""An oracle for a simulated year: the expected result of each call of `tick`.

It follows from the plan of the jobs and a calendar without a cron library, and shares no code with
the package.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from tests.support.schedule import START, Plan

END = datetime(2027, 1, 1, tzinfo=UTC)
MONTH = timedelta(days=30)
HOUR = timedelta(hours=1)
STOPS_IN = timedelta(minutes=1)


def list_wall_times(zone: str, hours: tuple[int, ...], minute: int) -> list[datetime]:
    """List the instants of fixed times of day: once in autumn, right after the gap in spring."""
    instants = set()
    for number in range(-1, 367):
        for hour in hours:
            wall = datetime.combine(date(2026, 1, 1) + timedelta(days=number), time(hour, minute))
            while True:
                instant = wall.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
                if instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None) == wall:
                    break
                wall += timedelta(minutes=1)
            instants.add(instant)
    return sorted(instants)


def list_step_times(zone: str, step: int) -> list[datetime]:
    """List the instants at which the wall clock shows a full hour that `step` divides."""
    hours = (START + HOUR * number for number in range(366 * 24))
    return [t for t in hours if t.astimezone(ZoneInfo(zone)).hour % step == 0]


def draw_calls(chance: random.Random, every: float) -> list[tuple[datetime, bool]]:
    """Draw irregular times of calls of `tick`, and whether the backend answers."""
    calls, now = [], START
    while now < END:
        gap = every * chance.uniform(0.3, 1.7)
        if chance.random() < 0.004:
            gap = chance.uniform(60, 60 * 60)  # no call for up to 60 hours
        now += timedelta(minutes=gap)
        calls.append((now.replace(microsecond=0), True))
    for _ in range(25):
        start = START + (END - START) * chance.random()
        length = timedelta(hours=chance.uniform(0.5, 20))
        calls = [(t, up and not start <= t < start + length) for t, up in calls]
    return calls


def build_plan(seed: int, longest: float, gpus: float):
    """Build a plan for every job: some fail, some last long."""

    def plan(job: str) -> Plan:
        chance = random.Random(f"{seed}/{job}")
        hours = chance.uniform(0.1, longest) * (4 if chance.random() < 0.1 else 1)
        status = chance.choices([0, 1, -9, None, 2], [70, 12, 8, 5, 5])[0]
        return Plan(hours, status, chance.uniform(0, gpus))

    return plan


@dataclass
class Oracle:
    """The expected fate of every scheduled time, by the plan alone."""

    times: list[datetime]
    overlap: str
    grace: timedelta
    attempts: int
    longest: timedelta | None
    month: float | None
    plan: object
    fates: dict[datetime, str] = field(default_factory=dict)
    ends: dict[datetime, str] = field(default_factory=dict)
    active: datetime | None = None
    attempt: int = 0
    job_ends: datetime | None = None
    status: int | None = None
    not_before: datetime | None = None
    began: datetime | None = None
    stopped: bool = False
    signalled: bool = False
    run_spent: float = 0.0
    queued: datetime | None = None
    spent: list[tuple[datetime, float]] = field(default_factory=list)
    since: datetime | None = None
    done: datetime | None = None

    def handle_call(self, now: datetime, up: bool) -> None:
        """Handle one call of `tick`."""
        if self.since is None:
            self.since = self.done = now
        self.follow(now, up)
        while True:
            if self.queued and self.active is None:
                if not up and not self.is_spent(now):
                    return self.late(now)
                tick, self.queued = self.queued, None
                self.start(tick, now, up)
                continue
            if self.queued and self.overlap == "replace" and not self.stopped:
                self.stop(now)
                self.follow(now, up)
                continue
            if not self.settle_due_times(now, up):
                return None

    def late(self, now: datetime) -> None:
        """Leave times undecided that become due while a queued run cannot start."""

    def settle_due_times(self, now: datetime, up: bool) -> bool:
        """Settle due times; return whether anything changed."""
        due = self.times[bisect_right(self.times, self.done) : bisect_right(self.times, now)]
        if not due:
            return False
        *earlier, latest = due
        if now - latest > self.grace:
            self.settle(due, "missed")
        elif earlier:
            self.settle(earlier, "missed")
        elif self.active is None:
            if not up and not self.is_spent(now):
                return False
            self.done = latest
            self.start(latest, now, up)
        elif self.overlap == "skip" or (self.overlap == "queue" and self.queued):
            self.settle(due, "overlap")
        else:
            if self.queued:
                self.fates[self.queued] = "overlap"
            self.queued, self.done = latest, latest
        return True

    def settle(self, times: list[datetime], fate: str) -> None:
        for t in times:
            assert t not in self.fates
            self.fates[t] = fate
        self.done = times[-1]

    def is_spent(self, now: datetime) -> bool:
        if self.month is None:
            return False
        return sum(h for t, h in self.spent if now - MONTH < t <= now) >= self.month

    def start(self, tick: datetime, now: datetime, up: bool) -> None:
        if self.is_spent(now):
            self.fates[tick] = "budget"
            return
        self.fates[tick] = "started"
        self.active, self.attempt, self.began = tick, 1, now
        self.stopped, self.signalled, self.run_spent = False, False, 0.0
        self.job_ends, self.not_before = None, None
        self.follow(now, up)

    def stop(self, now: datetime) -> None:
        self.stopped = True

    def follow(self, now: datetime, up: bool) -> None:
        """Advance the active run as far as possible."""
        while self.active is not None:
            over = self.longest is not None and now - self.began >= self.longest
            if not self.stopped and (over or (self.queued and self.overlap == "replace")):
                self.stop(now)
            if self.job_ends is None:
                if self.stopped:
                    return self.finish("stopped", now)
                if self.not_before and now < self.not_before:
                    return None
                if not up:
                    return None
                plan = self.plan(f"nightly-{self.active:%Y%m%dT%H%M%SZ}-a{self.attempt}")
                self.job_ends, self.status = now + timedelta(hours=plan.hours), plan.status
                self.run_spent += plan.gpu_hours
            if not up:
                return None
            if now < self.job_ends:
                if self.stopped and not self.signalled:
                    self.signalled = True
                    if now + STOPS_IN < self.job_ends:
                        self.job_ends, self.status = now + STOPS_IN, 130
                return None
            if self.status == 0:
                return self.finish("finished", now)
            if self.stopped:
                return self.finish("stopped", now)
            if self.attempt == self.attempts:
                return self.finish("failed", now)
            self.attempt += 1
            self.not_before = now + timedelta(minutes=10) if self.status == 2 else None
            self.job_ends = None
        return None

    def finish(self, how: str, now: datetime) -> None:
        self.ends[self.active] = how
        self.spent.append((now, self.run_spent))
        self.active = None
