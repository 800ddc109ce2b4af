"""A simulated year of ticks: daylight saving, outages, overlaps, failures and budgets."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta

import pytest

from gdpo_tune.clusters.schedule_state import KEPT_STATES, Notice
from gdpo_tune.clusters.scheduler import Scheduler
from gdpo_tune.core.errors import BackendUnreachableError
from tests.support.schedule import (
    Clock,
    FakeBackend,
    MemoryStorage,
    build_context,
    load_scheduled_sweep,
)
from tests.support.schedule_oracle import (
    HOUR,
    STOPS_IN,
    Oracle,
    build_plan,
    draw_calls,
    list_step_times,
    list_wall_times,
)

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


@pytest.mark.system
@pytest.mark.parametrize(
    ("scene", "limited"),
    [
        # each scene once and each kind of budget twice; the other half on request
        pytest.param(scene, limited, marks=() if limited == bool(number % 2) else pytest.mark.slow)
        for number, scene in enumerate(SCENES)
        for limited in (True, False)
    ],
)
def test_a_year_finds_no_run_twice_and_none_missing(scene, limited, tmp_path):
    schedule, policy, times_of, rules, scale = SCENES[scene]
    month = scale["month"] if limited else None
    budget = f"budget: {{gpu_hours_per_30d: {month}}}\n" if month else ""
    text = f"space: search_spaces/gpu.yaml\nschedule: {schedule}\npolicy: {policy}\n{budget}"
    sweep = load_scheduled_sweep(tmp_path, text)
    seed = sorted(SCENES).index(scene)
    plan = build_plan(seed, scale["longest"], 6.0)
    clock, storage = Clock(), MemoryStorage()
    backend = FakeBackend(clock, plan, takes_to_stop=STOPS_IN)
    oracle = Oracle(times_of(), month=month, plan=plan, **rules)

    context, record = build_context(sweep, clock, backend, storage), Observed()
    chance = random.Random(seed)
    for now, up in draw_calls(chance, scale["every"]):
        clock.now, backend.down = now, not up
        if chance.random() < 0.002:
            context = build_context(sweep, clock, backend, storage)  # another process or machine
        context.events.clear()
        context.tick()
        if context.events:
            record.add(context)
        oracle.handle_call(now, up)

    assert len(storage.files) == KEPT_STATES
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
    assert several["started"] > 50
    assert several["missed"] > 3
    assert several["overlap"] > 3 or limited or scene == "on time or not at all"
    assert (several["budget"] > 3) == limited
    assert {"finished", "failed"} <= set(oracle.ends.values())


class Killed(BaseException):
    """Stands for `kill -9`."""


class DyingStorage(MemoryStorage):
    """Kills its process before or after a write, or lets another process write first."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance, self.other_tick, self.enabled = chance, lambda: None, True

    def create(self, name: str, content: bytes) -> None:
        event = self.chance.random() if self.enabled else 1.0
        if event < 0.1:
            raise Killed
        if event < 0.2:
            self.enabled = False
            self.other_tick()
            self.enabled = True
        super().create(name, content)
        if event > 0.9 and self.enabled:
            raise Killed


@pytest.mark.system
@pytest.mark.parametrize("scene", SCENES)
def test_killed_and_simultaneous_ticks_find_no_run_twice_and_none_missing(scene, tmp_path):
    """Without an oracle, which does not know when a tick dies: by what must hold in any case."""
    schedule, policy, times_of, _, scale = SCENES[scene]
    text = f"space: search_spaces/gpu.yaml\nschedule: {schedule}\npolicy: {policy}\n"
    sweep, clock, record = load_scheduled_sweep(tmp_path, text), Clock(), Observed()
    chance = random.Random(scene)
    storage = DyingStorage(chance)
    plan = build_plan(1, scale["longest"], 6.0)
    backend = FakeBackend(clock, plan, takes_to_stop=STOPS_IN)

    def tick_once() -> None:
        with suppress(Killed):
            build_context(sweep, clock, backend, storage).tick()
        record.add(build_context(sweep, clock, backend, storage))

    def other_tick() -> None:
        if chance.random() < 0.5:
            return tick_once()
        context = build_context(sweep, clock, backend, storage)
        with suppress(Killed, BackendUnreachableError):
            context.run(clock(), wait=False)
        return record.add(build_context(sweep, clock, backend, storage))

    storage.other_tick = other_tick
    for now, up in draw_calls(chance, scale["every"])[:1200]:
        clock.now, backend.down = now, not up
        tick_once()

    times, state = times_of(), build_context(sweep, clock, backend, storage).state
    fates = record.fates(times)
    assert max(Counter(t for t, _ in fates).values()) == 1  # none twice
    expected = {t for t in times if state.since < t <= state.handled} - {state.queued}
    assert set(dict(fates)) == expected  # none missing
    assert Counter(dict(fates).values())["started"] > 3
    assert {job.rpartition("-a")[0] for job in backend.jobs} <= set(record.started)
    never_two_at_once(backend)


class Observed:
    """Runs and notices of all states that were seen."""

    def __init__(self) -> None:
        self.started: dict[str, datetime] = {}
        self.notices: dict[int, Notice] = {}

    def add(self, context: Scheduler) -> None:
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
