"""A simulated year of ticks: daylight saving, outages, overlaps, failures and budgets."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from gdpo_tune.clusters.tick import tick
from tests.support.schedule import Clock, FakeBackend, MemoryStore, desk_of, scheduled
from tests.support.schedule_oracle import (
    HOUR,
    STOPS_IN,
    Oracle,
    calls_of_a_year,
    plan_of,
    star_times,
    wall_times,
)

SCENES = {
    "nightly in Berlin, skip": (
        '{cron: "30 2 * * *", timezone: Europe/Berlin}',
        "{overlap: skip, missed_grace: 6h, max_attempts: 3}",
        lambda: wall_times("Europe/Berlin", (2,), 30),
        {"overlap": "skip", "grace": 6 * HOUR, "attempts": 3, "longest": None},
        {"every": 25, "longest": 12, "month": 60.0},
    ),
    "twice in the hours that change in New York, queue": (
        '{cron: "15 1,2 * * *", timezone: America/New_York}',
        "{overlap: queue, missed_grace: 3h, max_attempts: 2, max_runtime: 20h}",
        lambda: wall_times("America/New_York", (1, 2), 15),
        {"overlap": "queue", "grace": 3 * HOUR, "attempts": 2, "longest": 20 * HOUR},
        {"every": 40, "longest": 14, "month": 60.0},
    ),
    "every six hours of Berlin, replace": (
        '{cron: "0 */6 * * *", timezone: Europe/Berlin}',
        "{overlap: replace, missed_grace: 2h, max_attempts: 2}",
        lambda: star_times("Europe/Berlin", 6),
        {"overlap": "replace", "grace": 2 * HOUR, "attempts": 2, "longest": None},
        {"every": 35, "longest": 6, "month": 120.0},
    ),
    "on time or not at all": (
        '{cron: "0 4 * * *", timezone: Australia/Lord_Howe}',
        "{overlap: skip, missed: skip, max_attempts: 1, max_runtime: 9h}",
        lambda: wall_times("Australia/Lord_Howe", (4,), 0),
        {"overlap": "skip", "grace": timedelta(minutes=10), "attempts": 1, "longest": 9 * HOUR},
        {"every": 12, "longest": 12, "month": 30.0},
    ),
}


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
    sweep = scheduled(tmp_path, text)
    seed = sorted(SCENES).index(scene)
    plan = plan_of(seed, scale["longest"], 6.0)
    clock, store = Clock(), MemoryStore()
    backend = FakeBackend(clock, plan, takes_to_stop=STOPS_IN)
    oracle = Oracle(times_of(), month=month, plan=plan, **rules)

    desk = desk_of(sweep, clock, backend, store)
    chance = random.Random(seed)
    for now, up in calls_of_a_year(chance, scale["every"]):
        clock.now, backend.down = now, not up
        if chance.random() < 0.002:
            desk = desk_of(sweep, clock, backend, store)  # another process, on another machine
        tick(desk)
        oracle.call(now, up)

    events = desk_of(sweep, clock, backend, store).log.events
    fates: list[tuple[datetime, str]] = []
    for event in events:
        if event.kind == "started":
            fates.append((datetime.fromisoformat(event.about["tick"]), "started"))
        elif event.kind == "skipped":
            first, last = (datetime.fromisoformat(event.about[key]) for key in ("first", "last"))
            within = [t for t in oracle.times if first <= t <= last]
            assert len(within) == event.about["count"]
            fates += [(t, event.about["why"]) for t in within]
    assert max(Counter(t for t, _ in fates).values()) == 1  # none twice
    assert dict(fates) == oracle.fates
    last = max(oracle.fates)
    expected = {t for t in oracle.times if oracle.since < t <= last} - {oracle.queued}
    assert set(dict(fates)) == expected  # none missing

    ends = {
        datetime.strptime(event.about["run"][-16:], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC): event
        for event in events
        if event.kind == "ended"
    }
    assert {t: event.about["state"] for t, event in ends.items()} == oracle.ends
    assert len(backend.submissions) == len(set(backend.submissions))
    never_two_at_once(backend)
    several = Counter(oracle.fates.values())
    assert several["started"] > 50
    assert several["missed"] > 3
    assert several["overlap"] > 3 or limited or scene == "on time or not at all"
    assert (several["budget"] > 3) == limited
    assert {"finished", "failed"} <= set(oracle.ends.values())


def never_two_at_once(backend: FakeBackend) -> None:
    """Of the jobs of a schedule one runs at a time."""
    spans = sorted((began, backend.end(name)) for name, (began, _) in backend.jobs.items())
    for (_, end), (began, _) in itertools.pairwise(spans):
        assert end <= began
