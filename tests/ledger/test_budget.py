"""The spending of a sweep, and its end by a budget or by patience."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from gdpo_tune.tuning.plan import (
    PlannedTrial,
    count_planned,
    explain_end,
    find_next_trial,
    is_finished,
)
from gdpo_tune.tuning.proposals import Proposals
from tests.support.search_driver import Driver
from tests.support.tuning import build_outcome, load_code_spec

SMALL = ["search.sampler=random", "search.trials=6", "search.replicates.max_runs=0"]


def build_record(number: int, completions: int = 640, seconds: float = 1800.0) -> TrialRecord:
    role = ("untrained", "published")[number] if number < 2 else "search"
    cost = Cost(completions, seconds)
    return TrialRecord(number, role, "complete", {}, number, "model", cost=cost)


def test_spending_is_summed_over_all_trials(tmp_path: Path):
    spec = load_code_spec(tmp_path, ["resources={gpus: 1, workers: 2}"])
    records = [build_record(0), replace(build_record(1), state="running"), build_record(2)]
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
def test_no_trial_starts_once_a_budget_is_spent(tmp_path: Path, budget: str, words: str):
    spec = load_code_spec(tmp_path, [f"search.budget={budget}", "resources.gpus=1"])
    records = [build_record(number) for number in range(4)]
    assert describe_spent_budget(spec, records, 0.5) == f"the budget of {words} is spent"
    assert find_next_trial(spec, records, 0.5) is None
    assert is_finished(spec, records, 0.5)
    assert explain_end(spec, records, 0.5) == f"the budget of {words} is spent"
    assert find_next_trial(spec, records[:3], 0.49) is not None
    assert describe_spent_budget(spec, records[:3], 0.49) == ""


def test_a_sweep_without_a_budget_never_runs_out(tmp_path: Path):
    many = [build_record(number, 10**9, 10**9) for number in range(4)]
    assert describe_spent_budget(load_code_spec(tmp_path), many, 1e9) == ""


def test_hours_are_those_of_sessions_and_not_of_the_breaks_between_them():
    started = [0.0, 36_000.0, 90_000.0]
    sessions = [
        {"started": started[0], "finished": 3600.0},
        {"started": started[1]},  # killed: known of until the last end of a trial
        {"started": started[2]},
    ]
    records = [
        replace(build_record(0), started=10.0, finished=3500.0),
        replace(build_record(1), started=36_100.0, finished=37_800.0),
        replace(build_record(2), started=90_010.0, finished=None),
    ]
    assert compute_hours(sessions, records, now=93_600.0) == pytest.approx(1 + 0.5 + 1)
    assert compute_hours(sessions, records) == pytest.approx(1 + 0.5 + 10 / 3600)
    assert compute_hours([], []) == 0


def test_gaps_of_a_session_do_not_count_and_overlap_with_pauses_once():
    """Arithmetic: 4 h on the clock, 1 h asleep within a pause of 1.5 h, and set back by 1 h."""
    asleep, set_back = [7200.0, 3600.0], [12_000.0, -3600.0]
    session = {"started": 0.0, "finished": 14_400.0, "gaps": [asleep]}
    assert compute_hours([session], []) == pytest.approx(3)
    assert compute_hours([session], [], pauses=[(3000.0, 8400.0)]) == pytest.approx(2.5)
    assert compute_hours([{**session, "gaps": [asleep, set_back]}], []) == pytest.approx(4)
    running = {"started": 0.0, "gaps": [asleep]}
    assert compute_hours([running], [], now=9000.0) == pytest.approx(1.5)
    assert compute_hours([running], []) == 0  # killed before the first trial


def test_a_clock_of_work_leaves_out_stops_sleep_and_settings_of_the_clock():
    """CLOCK_MONOTONIC stands still in a suspended machine (clock_gettime(2)), not in a SIGSTOP."""
    now = {"wall": 1000.0, "monotonic": 0.0}
    clock = WorkClock(lambda: now["wall"], lambda: now["monotonic"])

    def pass_time(wall: float, monotonic: float) -> list[tuple[float, float]]:
        now["wall"] += wall
        now["monotonic"] += monotonic
        clock.tick()
        return clock.take_gaps()

    assert pass_time(1.0, 1.0) == []
    assert pass_time(1.5, 1.0) == []  # slewed by NTP
    assert pass_time(3601.0, 1.0) == [(4603.5, 3600.0)]  # the machine slept, or was set forward
    assert pass_time(600.0, 600.0) == [(5203.5, 600.0)]  # the process was stopped
    assert pass_time(-59.0, 1.0) == [(5144.5, -60.0)]  # set back


def test_gaps_are_recorded_in_the_session(tmp_path: Path):
    with Ledger.open(load_code_spec(tmp_path)) as ledger:
        session = ledger.begin_session(time.time() - 7200, 1, {})
        ledger._clock._gaps.append((time.time() - 600, 3600.0))
        ledger.record_gaps()
        ledger.record_gaps()
        assert ledger.compute_hours(time.time()) == pytest.approx(1, abs=0.1)
        ledger.end_session(session)
        (stored,) = ledger.get_sessions()
        assert [seconds for _, seconds in stored["gaps"]] == [3600.0]


def test_a_killed_session_lasted_at_least_until_its_last_rung():
    rungs = (
        Rung(1, {}, Cost(), recorded=7000.0),
        Rung(2, {}, Cost(), recorded=7200.0),
        Rung(3, {}, Cost()),
    )
    resumed = replace(build_record(0), started=100.0, finished=99_000.0, rungs=rungs)
    sessions = [{"started": 0.0}, {"started": 90_000.0, "finished": 93_600.0}]
    assert compute_hours(sessions, [resumed]) == pytest.approx(2 + 1)


def test_a_budget_ends_a_sweep_and_a_larger_one_extends_it(tmp_path: Path):
    first = load_code_spec(tmp_path, [*SMALL, "search.budget.completions=2000"])
    with Ledger.open(first) as ledger:
        Driver(ledger, slots=1).run()
        records = ledger.get_records()
    assert len(records) == 4  # three trials of 640 are too few, the fourth goes beyond
    assert count_planned(load_code_spec(tmp_path, [*SMALL, "search.budget.trials=5"]), records) == 5
    larger = load_code_spec(tmp_path, SMALL)
    with Ledger.open(larger) as ledger:
        Driver(ledger).run()
        assert len(ledger.get_records()) == 8
        assert explain_end(larger, ledger.get_records()) == "all 6 configurations were tried"


def test_hours_are_counted_without_reading_all_trials_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = load_code_spec(tmp_path, [*SMALL, "search.budget.hours=1"])
    plans: list[int] = []

    def counted(*arguments: Any) -> PlannedTrial | None:
        plans.append(len(plans))
        return find_next_trial(*arguments)

    monkeypatch.setattr(plan, "find_next_trial", counted)
    with Ledger.open(spec) as ledger:
        ledger.begin_session(0.0, 2, {})
        monkeypatch.setattr(plan.time, "time", lambda: 1800.0)
        driver = Driver(ledger)
        for _ in range(2):
            driver.end(driver.ask())
        monkeypatch.setattr(Proposals, "poll", lambda *_, **__: None)  # the sampler is thinking
        assert [driver.ask() for _ in range(3)] == [None] * 3
        assert len(plans) == 3
        monkeypatch.setattr(plan.time, "time", lambda: 3600.0)
        assert driver.ask() == "FINISHED"
        assert len(plans) == 4


def test_patience_ends_the_proposals_and_leaves_the_replicates(tmp_path: Path):
    replicates = "search.replicates={per_point: 1, max_runs: 1}"
    longer = ["search.sampler=random", "search.trials=30", "search.patience=3"]
    spec = load_code_spec(tmp_path, [*longer, replicates])
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=1)
        while isinstance(trial_id := driver.ask(), str) and trial_id in driver.in_flight:
            driver.end(trial_id, outcome=build_outcome())
        records = ledger.get_records()
    roles = [record.role for record in records]
    # the first search trial is no better than the published setting: three tries are enough
    assert roles == ["untrained", "published", "search", "search", "search", "replicate"]
    assert explain_end(spec, records) == "3 trials in a row did not move the hypervolume"


def test_enqueued_points_run_regardless_of_patience(tmp_path: Path):
    points = ", ".join(f"{{learning_rate: {rate}e-4}}" for rate in (1, 1.5, 2, 2.5))
    spec = load_code_spec(tmp_path, [*SMALL, "search.patience=1", f"enqueue=[{points}]"])
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=1)
        while isinstance(trial_id := driver.ask(), str) and trial_id in driver.in_flight:
            driver.end(trial_id, outcome=build_outcome())
        assert [r.proposer for r in ledger.get_records()[2:]] == ["enqueued"] * 4
