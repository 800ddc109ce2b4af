"""The spending of a sweep, and its end by a budget or by patience."""

import math
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import pytest

from gdpo_tune.core.trials import Cost, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.budget import (
    WorkClock,
    compute_hours,
    compute_spending,
    describe_spent_budget,
)
from gdpo_tune.tuning import plan
from gdpo_tune.tuning.plan import count_planned, explain_end, find_next_trial, is_finished
from gdpo_tune.tuning.proposals import Proposals
from tests.support.search_driver import Driver
from tests.support.tuning import build_outcome, load_code_spec

SMALL = ["search.sampler=random", "search.trials=6", "search.replicates.max_runs=0"]


def build_record(number, completions=640, seconds=1800.0, **changes):
    role = ("untrained", "published")[number] if number < 2 else "search"
    record = TrialRecord(number, role, "complete", {}, number, "model")
    return replace(record, cost=Cost(completions, seconds), **changes)


def test_spending_is_summed_over_all_trials(tmp_path):
    spec = load_code_spec(tmp_path, ["resources={gpus: 1, workers: 2}"])
    records = [build_record(0), build_record(1, state="running"), build_record(2)]
    spending = {"trials": 3, "completions": 1920, "gpu_hours": 3.0, "hours": 1.5}
    assert compute_spending(spec, records, 1.5) == spending


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("{trials: 4}", "4 trials"),
        ("{completions: 2560}", "2,560 completions"),
        ("{gpu_hours: 2}", "2 GPU-hours"),
        ("{hours: 0.5}", "0.5 hours"),
        ("{trials: 9, hours: 0.5}", "0.5 hours"),
    ],
)
def test_no_trial_starts_once_a_budget_is_spent(tmp_path, budget, words):
    spec = load_code_spec(tmp_path, [f"search.budget={budget}", "resources.gpus=1"])
    records = [build_record(number) for number in range(4)]
    assert describe_spent_budget(spec, records, 0.5) == f"the budget of {words} is spent"
    assert find_next_trial(spec, records, 0.5) is None
    assert is_finished(spec, records, 0.5)
    assert explain_end(spec, records, 0.5) == f"the budget of {words} is spent"
    assert find_next_trial(spec, records[:3], 0.49) is not None
    assert describe_spent_budget(spec, records[:3], 0.49) == ""
    many = [build_record(number, 10**9, 10**9) for number in range(4)]
    assert describe_spent_budget(load_code_spec(tmp_path), many, 1e9) == "", "without a budget"


def test_hours_are_those_of_sessions_and_not_of_the_breaks_between_them():
    started = [0.0, 36_000.0, 90_000.0]
    sessions = [
        {"started": started[0], "finished": 3600.0},
        {"started": started[1]},  # killed: known of until the last end of a trial
        {"started": started[2]},
    ]
    records = [
        build_record(0, started=10.0, finished=3500.0),
        build_record(1, started=36_100.0, finished=37_800.0),
        build_record(2, started=90_010.0, finished=None),
    ]
    assert compute_hours(sessions, records, now=93_600.0) == pytest.approx(1 + 0.5 + 1)
    assert compute_hours(sessions, records) == pytest.approx(1 + 0.5 + 10 / 3600)
    assert compute_hours([], []) == 0


def test_a_killed_session_lasted_at_least_until_its_last_rung():
    rungs = [Rung(1, {}, Cost(), recorded=7000.0), Rung(2, {}, Cost(), recorded=7200.0)]
    rungs.append(Rung(3, {}, Cost()))
    resumed = build_record(0, started=100.0, finished=99_000.0, rungs=tuple(rungs))
    sessions = [{"started": 0.0}, {"started": 90_000.0, "finished": 93_600.0}]
    assert compute_hours(sessions, [resumed]) == pytest.approx(2 + 1)


ASLEEP, SET_BACK = [7200.0, 3600.0], [12_000.0, -3600.0]
DAY = {"started": 0.0, "finished": 14_400.0, "gaps": [ASLEEP]}
RUNNING = {"started": 0.0, "gaps": [ASLEEP]}
TWO = [{"started": 0.0, "finished": 7200.0}, {"started": 10_000.0}]


@pytest.mark.parametrize(
    ("sessions", "now", "pauses", "hours"),
    [
        ([DAY], None, [], 3),  # arithmetic: 4 h on the clock, 1 h asleep
        ([DAY], None, [(3000.0, 8400.0)], 2.5),  # within a pause of 1.5 h
        ([{**DAY, "gaps": [ASLEEP, SET_BACK]}], None, [], 4),  # and set back by 1 h
        ([RUNNING], 9000.0, [], 1.5),
        ([RUNNING], None, [], 0),  # killed before the first trial
        (TWO, 17_200.0, [(3600.0, 12_000.0), (15_000.0, math.inf)], 1 + 3000 / 3600),
        (TWO, 17_200.0, [], 2 + 2),
    ],
)
def test_gaps_and_pauses_of_a_session_do_not_count(sessions, now, pauses, hours):
    assert compute_hours(sessions, [], now, pauses) == pytest.approx(hours)


def test_a_clock_of_work_leaves_out_stops_sleep_and_settings_of_the_clock():
    """CLOCK_MONOTONIC stands still in a suspended machine (clock_gettime(2)), not in a SIGSTOP."""
    now = {"wall": 1000.0, "monotonic": 0.0}
    clock = WorkClock(lambda: now["wall"], lambda: now["monotonic"])

    def pass_time(wall, monotonic):
        now["wall"] += wall
        now["monotonic"] += monotonic
        clock.tick()
        return clock.take_gaps()

    assert pass_time(1.0, 1.0) == []
    assert pass_time(1.5, 1.0) == []  # slewed by NTP
    assert pass_time(3601.0, 1.0) == [(4603.5, 3600.0)]  # the machine slept, or was set forward
    assert pass_time(600.0, 600.0) == [(5203.5, 600.0)]  # the process was stopped
    assert pass_time(-59.0, 1.0) == [(5144.5, -60.0)]  # set back


def test_a_clock_of_work_ticks_in_a_thread_until_it_is_ended(monkeypatch):
    monkeypatch.setattr(WorkClock, "TICK", 0.001)
    now, deadline = [1000.0], time.monotonic() + 60
    clock = WorkClock(lambda: now[-1])
    clock.start()
    now.append(4600.0)
    while not (gaps := clock.take_gaps()) and time.monotonic() < deadline:
        time.sleep(0.001)
    clock.ended.set()
    clock.join()
    assert gaps == [(4600.0, pytest.approx(3600.0, abs=60))]


def test_gaps_are_recorded_in_the_newest_session_when_a_trial_is_asked_for(tmp_path):
    gaps = []
    with (
        patch.object(WorkClock, "take_gaps", lambda _: gaps.pop(0) if gaps else []),
        Ledger.open(load_code_spec(tmp_path)) as ledger,
    ):
        ledger.end_session(ledger.begin_session(time.time(), 1, {}))
        session = ledger.begin_session(time.time() - 7200, 1, {})
        gaps.append([(time.time() - 600, 3600.0)])
        assert "work-clock" in {thread.name for thread in threading.enumerate()}
        Driver(ledger).ask()
        ledger.record_gaps()
        assert ledger.compute_hours(time.time()) == pytest.approx(1, abs=0.1)
        ledger.end_session(session)
        first, second = ledger.get_sessions()
    assert "gaps" not in first
    assert [seconds for _, seconds in second["gaps"]] == [3600.0]


def run(spec, outcome=None):
    """Run a sweep, one trial at a time, to its end; return its records."""
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=1)
        while (trial := driver.ask()) != driver.searcher.FINISHED:
            if trial is not None:  # else the sampler is thinking
                driver.end(trial, outcome=outcome)
        return ledger.get_records()


def test_a_budget_ends_a_sweep_and_a_larger_one_extends_it(tmp_path):
    records = run(load_code_spec(tmp_path, [*SMALL, "search.budget.completions=2000"]))
    assert len(records) == 4  # three trials of 640 are too few, the fourth goes beyond
    assert count_planned(load_code_spec(tmp_path, [*SMALL, "search.budget.trials=5"]), records) == 5
    larger = load_code_spec(tmp_path, SMALL)
    records = run(larger)
    assert len(records) == 8
    assert explain_end(larger, records) == "all 6 configurations were tried"


def test_hours_are_counted_without_reading_all_trials_again(tmp_path, monkeypatch):
    monkeypatch.setattr(plan.time, "time", lambda: 1800.0)
    counted = patch.object(plan, "find_next_trial", side_effect=find_next_trial)
    spec = load_code_spec(tmp_path, [*SMALL, "search.budget.hours=1"])
    with Ledger.open(spec) as ledger, counted as plans:
        ledger.begin_session(0.0, 2, {})
        driver = Driver(ledger)
        for _ in range(2):
            driver.end(driver.ask())
        monkeypatch.setattr(Proposals, "poll", lambda *_, **__: None)  # the sampler is thinking
        assert [driver.ask() for _ in range(3)] == [None] * 3
        assert plans.call_count == 3
        monkeypatch.setattr(plan.time, "time", lambda: 3600.0)
        assert driver.ask() == "FINISHED"
        assert plans.call_count == 4


def test_patience_ends_the_proposals_and_leaves_the_replicates(tmp_path):
    longer = ["search.sampler=random", "search.trials=30", "search.patience=3"]
    spec = load_code_spec(tmp_path, [*longer, "search.replicates={per_point: 1, max_runs: 1}"])
    records = run(spec, build_outcome())
    # the first search trial is no better than the published setting: three tries are enough
    roles = ["untrained", "published", "search", "search", "search", "replicate"]
    assert [record.role for record in records] == roles
    assert explain_end(spec, records) == "3 trials in a row did not move the hypervolume"


def test_enqueued_points_run_regardless_of_patience(tmp_path):
    points = ", ".join(f"{{learning_rate: {rate}e-4}}" for rate in (1, 1.5, 2, 2.5))
    spec = load_code_spec(tmp_path, [*SMALL, "search.patience=1", f"enqueue=[{points}]"])
    assert [r.proposer for r in run(spec, build_outcome())[2:]] == ["enqueued"] * 4
