"""Cron lines in time zones, and seasons and years of ticks, by calendars of our own.

The ticks meet daylight saving, outages, overlaps, failures, budgets, and deaths of their process.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from gdpo_tune.clusters.schedule_spec import CronSchedule, check_zone
from gdpo_tune.clusters.schedule_state import ScheduleHistory
from gdpo_tune.core.errors import BackendUnreachableError
from tests.support.schedule import (
    START,
    Clock,
    FakeBackend,
    Plan,
    build_context,
    load_scheduled_sweep,
)

SPANS = {
    "year": (START, datetime(2027, 1, 1, tzinfo=UTC)),
    # the clocks change in March and April, and in October and November
    "spring": (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 5, 1, tzinfo=UTC)),
    "autumn": (datetime(2026, 9, 20, tzinfo=UTC), datetime(2026, 11, 20, tzinfo=UTC)),
}
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata")
MONTH = timedelta(days=30)
HOUR = timedelta(hours=1)
STOPS_IN = timedelta(minutes=1)


def list_wall_times(zone: str, hours: tuple[int, ...], minute: int) -> list[datetime]:
    """List the instants of fixed times of day: once in autumn, right after the gap in spring."""
    instants = set()
    for number, hour in itertools.product(range(-1, 367), hours):
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


# Cron lines


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(("hour", "minute"), [(2, 30), (2, 0), (1, 30), (0, 0), (3, 0), (23, 59)])
def test_a_fixed_time_follows_the_wall_clock(zone, hour, minute):
    start, end = SPANS["year"]
    found = CronSchedule(cron=f"{minute} {hour} * * *", timezone=zone).list_times(start, end)
    assert found == [t for t in list_wall_times(zone, (hour,), minute) if start < t <= end]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("weeks", [((3, 7), (4, 7)), ((10, 3), (11, 3))])
def test_a_line_with_stars_follows_real_time(zone, weeks):
    """In the weeks in which the clocks of some zones change."""
    start, end = (datetime(2026, month, day, tzinfo=UTC) for month, day in weeks)
    quarter = timedelta(minutes=15)
    instants = [start + quarter * number for number in range(1, (end - start) // quarter + 1)]
    walls = [(instant, instant.astimezone(ZoneInfo(zone))) for instant in instants]
    found = CronSchedule(cron="*/30 * * * *", timezone=zone).list_times(start, end)
    assert found == [instant for instant, wall in walls if wall.minute in (0, 30)]
    if zone == "Australia/Lord_Howe":
        return  # shifts by half an hour, which cronsim's walk by hours steps over: see `cron`
    found = CronSchedule(cron="15 */6 * * *", timezone=zone).list_times(start, end)
    assert found == [i for i, wall in walls if wall.hour % 6 == 0 and wall.minute == 15]


def test_saturdays():
    start, end = SPANS["year"]
    found = CronSchedule(cron="0 20 * * 6", timezone="Europe/Berlin").list_times(start, end)
    evenings = list_wall_times("Europe/Berlin", (20,), 0)
    assert found == [t for t in evenings if start < t <= end and t.weekday() == 5]
    assert len(found) == 52


def test_two_times_in_the_missing_hour_are_one():
    night = datetime(2026, 3, 29, tzinfo=UTC)
    berlin = CronSchedule(cron="0,30 2,3 * * *", timezone="Europe/Berlin")
    # 03:00 and 03:30 of summer; 02:00 and 02:30 would be 03:00
    assert berlin.list_times(night, night + 12 * HOUR) == [night + HOUR, night + 1.5 * HOUR]


@pytest.mark.parametrize(
    ("zone", "hour", "nights"),
    [
        ("Europe/Berlin", 12, ((3, 28), (10, 24))),
        ("Australia/Lord_Howe", 12, ((4, 4), (10, 3))),
        ("America/New_York", 0, ((3, 8), (11, 1))),
    ],
)
def test_where_the_search_begins_makes_no_difference(zone, hour, nights):
    schedule = CronSchedule(cron="10,40 0-3 * * *", timezone=zone)
    for month, day in nights:
        start = datetime(2026, month, day, hour, tzinfo=UTC)
        end = start + timedelta(hours=24)
        whole = schedule.list_times(start, end)
        cuts = [start + timedelta(minutes=7) * number for number in range(24 * 60 // 7)]
        parts = [schedule.list_times(a, b) for a, b in itertools.pairwise([*cuts, end])]
        assert list(itertools.chain(*parts)) == whole
        assert len(whole) == len(set(whole))


@pytest.mark.parametrize(
    ("line", "moment", "last"),
    [
        ("30 2 * * *", (2026, 3, 29, 0, 59), (2026, 3, 28, 1, 30)),
        ("30 2 * * *", (2026, 3, 29, 1), (2026, 3, 29, 1)),
        ("0 0 29 2 *", (2027, 1, 1), (2024, 2, 28, 23)),
    ],
)
def test_the_last_time_before_a_moment(line, moment, last):
    schedule = CronSchedule(cron=line, timezone="Europe/Berlin")
    found = schedule.find_last_time(datetime(*moment, tzinfo=UTC))
    assert found == datetime(*last, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "reason", "fix"),
    [
        ("0 2 * *", "4 fields, not five", "0 2 * * *"),
        ("0 0 2 * * *", "6 fields, not five", "0 2 * * *"),
        ("", "0 fields, not five", "0 2 * * *"),
        ("@daily", "not five fields", '"0 0 * * *"'),
        ("60 2 * * *", "bad minute", "ranges"),
        ("0 24 * * *", "bad hour", "ranges"),
        ("0 2 32 * *", "bad day-of-month", "ranges"),
        ("0 2 31 2 *", "there is no such day", "a day that exists"),
        ("0 2 * 13 *", "bad month", "ranges"),
        ("0 2 * * 8", "bad day-of-week", "ranges"),
        ("*/0 2 * * *", "bad minute", "ranges"),
        ("5-1 2 * * *", "bad minute", "ranges"),
        ("0 2 * 2 1#5 x", "6 fields, not five", "0 2 * * *"),
        ("0 0 30,31 2 *", "there is no such day", "a day that exists"),
        ("0 0 30 2 8", "bad day-of-week", "ranges"),
    ],
)
def test_lines_that_cannot_be_used(line, reason, fix):
    with pytest.raises(ValidationError) as caught:
        CronSchedule(cron=line)
    (error,) = caught.value.errors()
    assert reason in error["msg"]
    assert fix in error["ctx"]["fix"]


def test_lines_and_zones_that_can_be_used():
    for line in ("0 2 * * *", "*/15 9-17 * JAN-MAR MON-FRI", "0 0 L * *", "0 0 29 2 *"):
        assert CronSchedule(cron=line).cron == line
    for zone in ("Europe/Berlin", "UTC", "America/Argentina/Buenos_Aires"):
        assert check_zone(zone) == zone


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("europe/berln", "did you mean 'Europe/Berlin' or "),
        *((name, "") for name in ("Europe", "../etc/passwd", "", "/UTC", "MEZ/x")),
        ("Mars", "write a name"),
    ],
)
def test_zones_that_do_not_exist(name, fix):
    with pytest.raises(PydanticCustomError, match="unknown time zone") as caught:
        check_zone(name)
    assert caught.value.context["fix"].startswith(fix)


# Ticks


def draw_calls(chance: random.Random, every: float, start: datetime, end: datetime):
    """Draw irregular times of calls of `tick`, and whether the backend answers."""
    calls, now = [], start
    while now < end:
        gap = every * chance.uniform(0.3, 1.7)
        if chance.random() < 0.004:
            gap = chance.uniform(60, 60 * 60)  # no call for up to 60 hours
        now += timedelta(minutes=gap)
        calls.append((now.replace(microsecond=0), True))
    for _ in range(math.ceil((end - start) / timedelta(days=14))):
        down = start + (end - start) * chance.random()
        length = timedelta(hours=chance.uniform(0.5, 20))
        calls = [(t, up and not down <= t < down + length) for t, up in calls]
    return calls


def build_plan(seed: int, longest: float):
    """Build a plan for every job: some fail, some last long."""

    def plan(job: str) -> Plan:
        chance = random.Random(f"{seed}/{job}")
        hours = chance.uniform(0.1, longest) * (4 if chance.random() < 0.1 else 1)
        status = chance.choices([0, 1, -9, None, 2], [70, 12, 8, 5, 5])[0]
        return Plan(hours, status, chance.uniform(0, 6.0))

    return plan


class Oracle:
    """The expected fate of every scheduled time, by the plan alone."""

    def __init__(self, times, plan, month, *, overlap, grace, attempts, longest):
        self.times, self.plan, self.month = times, plan, month
        self.overlap, self.grace, self.attempts, self.longest = overlap, grace, attempts, longest
        self.fates, self.ends, self.spent = {}, {}, []
        self.active = self.queued = self.since = self.done = None

    def handle_call(self, now: datetime, up: bool) -> None:
        """Handle one call of `tick`; times due while a queued run cannot start stay undecided."""
        if self.since is None:
            self.since = self.done = now
        self.follow(now, up)
        while True:
            if self.queued and self.active is None:
                if not up and not self.is_spent(now):
                    return
                tick, self.queued = self.queued, None
                self.start(tick, now, up)
            elif self.queued and self.overlap == "replace" and not self.stopped:
                self.stopped = True
                self.follow(now, up)
            elif not self.settle_due_times(now, up):
                return

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

    def follow(self, now: datetime, up: bool) -> None:
        """Advance the active run as far as possible."""
        while self.active is not None:
            over = self.longest is not None and now - self.began >= self.longest
            if not self.stopped and (over or (self.queued and self.overlap == "replace")):
                self.stopped = True
            if self.job_ends is None:
                if self.stopped:
                    return self.finish("stopped", now)
                if not up or (self.not_before and now < self.not_before):
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


SCENES = {
    "nightly in Berlin, skip": (
        '{cron: "30 2 * * *", timezone: Europe/Berlin}',
        "{overlap: skip, missed_grace: 6h, max_attempts: 3}",
        lambda: list_wall_times("Europe/Berlin", (2,), 30),
        {"overlap": "skip", "grace": 6 * HOUR, "attempts": 3, "longest": None},
        {"every": 25, "longest": 12, "month": 60.0},
    ),
    "twice in the hours that change in New York, queue": (
        '{cron: "15 1,2 * * *", timezone: America/New_York}',
        "{overlap: queue, missed_grace: 3h, max_attempts: 2, max_runtime: 20h}",
        lambda: list_wall_times("America/New_York", (1, 2), 15),
        {"overlap": "queue", "grace": 3 * HOUR, "attempts": 2, "longest": 20 * HOUR},
        {"every": 40, "longest": 14, "month": 60.0},
    ),
    "every six hours of Berlin, replace": (
        '{cron: "0 */6 * * *", timezone: Europe/Berlin}',
        "{overlap: replace, missed_grace: 2h, max_attempts: 2}",
        lambda: list_step_times("Europe/Berlin", 6),
        {"overlap": "replace", "grace": 2 * HOUR, "attempts": 2, "longest": None},
        {"every": 35, "longest": 6, "month": 120.0},
    ),
    "on time or not at all": (
        '{cron: "0 4 * * *", timezone: Australia/Lord_Howe}',
        "{overlap: skip, missed: skip, max_attempts: 1, max_runtime: 9h}",
        lambda: list_wall_times("Australia/Lord_Howe", (4,), 0),
        {"overlap": "skip", "grace": timedelta(minutes=10), "attempts": 1, "longest": 9 * HOUR},
        {"every": 12, "longest": 12, "month": 30.0},
    ),
}


def read_scene(scene: str, tmp_path: Path, seed: int, budget: str = ""):
    """Load the sweep of a scene, and build a backend for it."""
    schedule, policy, times_of, rules, scale = SCENES[scene]
    text = f"space: search_spaces/gpu.yaml\nschedule: {schedule}\npolicy: {policy}\n{budget}"
    sweep, plan = load_scheduled_sweep(tmp_path, text), build_plan(seed, scale["longest"])
    backend = FakeBackend(Clock(), plan, takes_to_stop=STOPS_IN)
    return sweep, backend, times_of(), rules, scale


@pytest.mark.system
@pytest.mark.parametrize(
    ("scene", "limited", "span"),
    [
        # each scene and each season with and without a budget; whole years on request
        pytest.param(scene, limited, span, marks=pytest.mark.slow if span == "year" else ())
        for number, scene in enumerate(SCENES)
        for limited in (True, False)
        for span in ("year", "spring" if limited == bool(number % 2) else "autumn")
    ],
)
def test_no_run_is_found_twice_and_none_is_missing(scene, limited, span, tmp_path):
    month = SCENES[scene][-1]["month"] if limited else None
    budget = f"budget: {{gpu_hours_per_30d: {month}}}\n" if month else ""
    seed = sorted(SCENES).index(scene)
    sweep, backend, times, rules, scale = read_scene(scene, tmp_path, seed, budget)
    clock, chance = backend.clock, random.Random(seed)
    oracle = Oracle(times, backend.plan, month, **rules)
    context, record = build_context(sweep, clock, backend), Observed()
    for now, up in draw_calls(chance, scale["every"], *SPANS[span]):
        clock.now, backend.down = now, not up
        if chance.random() < 0.002:
            context = build_context(sweep, clock, backend)  # another process or machine
        context.events.clear()
        context.tick()
        if context.events:
            record.add(context)
        oracle.handle_call(now, up)

    fates = record.fates(oracle.times)
    assert max(Counter(t for t, _ in fates).values()) == 1  # none twice
    assert dict(fates) == oracle.fates
    last = max(oracle.fates)
    expected = {t for t in oracle.times if oracle.since < t <= last} - {oracle.queued}
    assert set(dict(fates)) == expected  # none missing

    assert record.ends == oracle.ends
    assert len(backend.submissions) == len(set(backend.submissions))
    never_two_at_once(backend)
    several = Counter(oracle.fates.values())
    started, few = (50, 3) if span == "year" else (8, 0)
    assert several["started"] > started
    assert several["missed"] > few
    assert several["overlap"] > few or limited or scene == "on time or not at all"
    assert (several["budget"] > few) == limited
    assert {"finished", *(("failed",) if span == "year" else ())} <= {*oracle.ends.values()}


class Killed(BaseException):
    """Stands for `kill -9`."""


class DyingHistory(ScheduleHistory):
    """Kills its process before or after a write."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        super().__init__(directory)
        self.chance = chance

    def save(self) -> None:
        event = self.chance.random()
        if event < 0.1:
            raise Killed
        super().save()
        if event > 0.9:
            raise Killed


@pytest.mark.system
@pytest.mark.parametrize("scene", SCENES)
def test_killed_ticks_find_no_run_twice_and_none_missing(scene, tmp_path):
    """Without an oracle, which does not know when a tick dies: by what must hold in any case."""
    sweep, backend, times, _, scale = read_scene(scene, tmp_path, 1)
    clock, record, chance = backend.clock, Observed(), random.Random(scene)
    for now, up in draw_calls(chance, scale["every"], *SPANS["year"])[:1200]:
        clock.now, backend.down = now, not up
        history = DyingHistory(sweep.state_directory, chance)
        context = build_context(sweep, clock, backend, history)
        with suppress(Killed, BackendUnreachableError):
            if chance.random() < 0.05:
                context.run(now, wait=False)
            else:
                context.tick()
        record.add(build_context(sweep, clock, backend))

    state = build_context(sweep, clock, backend).state
    fates = record.fates(times)
    assert max(Counter(t for t, _ in fates).values()) == 1  # none twice
    expected = {t for t in times if state.since < t <= state.handled} - {state.queued}
    assert set(dict(fates)) == expected  # none missing
    assert Counter(dict(fates).values())["started"] > 3
    assert {job.rpartition("-a")[0] for job in backend.jobs} <= set(record.started)
    never_two_at_once(backend)


class Observed:
    """Runs and notices of all states that were seen."""

    def __init__(self):
        self.started, self.notices = {}, {}

    def add(self, context):
        self.started |= {run.name: run.due for run in context.state.runs}
        self.notices |= {notice.number: notice for notice in context.state.notices}

    def fates(self, times: list[datetime]) -> list[tuple[datetime, str]]:
        """Every time that was started or skipped, with `started` or the reason."""
        found = [(due, "started") for due in self.started.values() if due in times]
        for notice in self.notices.values():
            if notice.skipped is not None:
                first, last = notice.skipped
                within = [time for time in times if first <= time <= last]
                by_name = first == last and first not in times
                assert by_name or len(within) == notice.details["count"]
                found += [(time, notice.why) for time in within]
        return found

    @property
    def ends(self) -> dict[datetime, str]:
        ends = [notice for notice in self.notices.values() if notice.skipped is None]
        return {self.started[end.details["run"]]: end.occasion for end in ends}


def never_two_at_once(backend: FakeBackend) -> None:
    """Of the jobs of a schedule one runs at a time."""
    spans = sorted((began, backend.compute_end(name)) for name, (began, _) in backend.jobs.items())
    for (_, end), (began, _) in itertools.pairwise(spans):
        assert end <= began
