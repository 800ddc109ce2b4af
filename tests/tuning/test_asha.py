"""Sweeps that stop trials at rungs: records, requests to trials, and restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.events import TrialFinished, TrialPaused
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Outcome, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.attempts import HALT, Failed
from gdpo_tune.tuning.halving import SuccessiveHalving
from gdpo_tune.tuning.plan import is_finished
from gdpo_tune.tuning.schedulers import Verdict
from tests.support.search_driver import Driver, Killed, SteppedDriver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

QUICK = ("search.sampler=random", "search.trials=9", "search.replicates.max_runs=0")
FIFO = "search.scheduler={type: fifo}"
ASHA = "search.scheduler={type: asha, grace: 0.1}"
PROMOTE = "search.scheduler={type: asha, grace: 0.1, variant: promote}"
RUNGS = (7, 20)


class StepDriver(SteppedDriver):
    """A driver whose trials train from rung to rung, stop at a halt request, and resume."""

    def __init__(self, ledger: Ledger, slots: int = 2, dies_after: int = 10**9) -> None:
        super().__init__(ledger, slots, dies_after)

    def advance(self, trial_id: str) -> None:
        """Advance one trial to its next rung or its end."""
        config = self.in_flight[trial_id]
        at = read_progress(config)
        rungs = [step for step in config.evaluate_at if step > at]
        step = rungs[0] if rungs else config.training.steps
        self.tick()
        self.report(trial_id, build_measurement(step, **compute_values(config)))
        self.tick()
        write_progress(config, step)
        if (config.directory / HALT).exists():
            self.end(trial_id, interrupted=True)
        elif step == config.training.steps:
            self.end(trial_id, outcome=build_final_outcome(config))


def compute_values(config: TrialConfig) -> dict[str, float]:
    """Compute two objectives that trade off, with a distance from the best trade-off."""
    weight = float(config.params["reward_weights.format"])
    loss = config.seed % 7 / 10
    share = weight / (1 + weight)
    return {"correctness": 1 - share - loss, "format": share - loss, "length": 0.5}


def build_final_outcome(config: TrialConfig) -> Outcome:
    spent = Cost(completions=64 * config.training.steps)
    return replace(build_outcome(**compute_values(config)), cost=spent)


def read_progress(config: TrialConfig) -> int:
    file = config.directory / "checkpoint"
    return int(file.read_text()) if file.exists() else 0


def write_progress(config: TrialConfig, step: int) -> None:
    config.directory.mkdir(parents=True, exist_ok=True)
    (config.directory / "checkpoint").write_text(str(step))


def run_sweep(directory: Path, *overrides: str) -> tuple[SweepSpec, list[TrialRecord]]:
    spec = load_code_spec(directory, [*QUICK, *overrides])
    with Ledger.open(spec) as ledger:
        StepDriver(ledger).run()
        return spec, ledger.get_records()


def begin_search(ledger: Ledger, slots: int = 2) -> Driver:
    """Run the baselines."""
    driver = Driver(ledger, slots)
    driver.end(driver.ask())
    driver.end(driver.ask())
    return driver


def report_equal(driver: Driver, trial: str, step: int, value: float) -> None:
    driver.report(trial, build_measurement(step, correctness=value, format=value, length=value))


def list_facts(records: list[TrialRecord]) -> list[Any]:
    """List the facts that kills of the driver must not change."""
    return [
        (r.number, r.role, r.state, r.params, r.seed, r.reason, r.rungs, r.validation)
        for r in records
    ]


def test_dominated_trials_end_at_a_rung_with_a_reason(tmp_path: Path):
    spec, records = run_sweep(tmp_path, ASHA)
    pruned = [record for record in records if record.state == "pruned"]
    complete = [r for r in records if r.state == "complete" and r.role == "search"]
    assert len(pruned) + len(complete) == 9
    assert pruned
    assert complete
    assert is_finished(spec, records)
    for record in pruned:
        last = record.rungs[-1]
        assert last.step in RUNGS
        assert record.reason.startswith(f"stopped at rung {64 * last.step:,}: dominated by #")
        assert record.cost == last.cost
        assert not record.validation
    for record in complete:
        assert [rung.step for rung in record.rungs] == [*RUNGS, 60]


def test_fifo_uses_no_rungs(tmp_path: Path):
    _, records = run_sweep(tmp_path, FIFO)
    assert {record.state for record in records} == {"complete"}
    assert {tuple(rung.step for rung in record.rungs) for record in records} == {(60,)}


def test_baselines_and_replicates_are_not_compared_at_rungs(tmp_path: Path):
    _, records = run_sweep(tmp_path, ASHA, "search.replicates={per_point: 2, max_runs: 4}")
    others = [record for record in records if record.role != "search"]
    assert {record.role for record in others} == {"untrained", "published", "replicate"}
    assert {record.state for record in others} == {"complete"}
    assert {len(record.rungs) for record in others} == {1}


@pytest.mark.parametrize("scheduler", [ASHA, PROMOTE])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_sweep_ends_with_no_trial_running(tmp_path: Path, scheduler: str, slots: int):
    spec = load_code_spec(tmp_path, [*QUICK, "search.trials=30", scheduler])
    with Ledger.open(spec) as ledger:
        StepDriver(ledger, slots).run()
        records = ledger.get_records()
        assert {trial.state.name for trial in ledger.study.trials} == {"COMPLETE", "PRUNED"}
    assert is_finished(spec, records)
    assert len(records) == 32


def test_a_paused_trial_takes_no_slot_and_resumes_at_its_step(tmp_path: Path):
    spec = load_code_spec(tmp_path, [*QUICK, "search.trials=30", PROMOTE])
    with Ledger.open(spec) as ledger:
        driver = StepDriver(ledger, slots=1)
        driver.run()
        records = ledger.get_records()
    paused = [event.record for event in driver.events if isinstance(event, TrialPaused)]
    promoted = [r for r in records if r.paused_at and r.rungs[-1].completions > r.paused_at]
    never = [r for r in records if "was not promoted" in r.reason]
    assert len(paused) >= len(promoted) + len(never)
    assert promoted
    assert never
    for record in promoted:
        steps = [rung.step for rung in record.rungs]
        assert steps == [*RUNGS, 60][: len(steps)], "each rung once: nothing was trained again"
    ended = [event.record.number for event in driver.events if isinstance(event, TrialFinished)]
    assert sorted(ended) == list(range(32))


@pytest.mark.parametrize("scheduler", [ASHA, PROMOTE])
def test_a_kill_of_the_driver_at_any_write_does_not_change_the_result(
    tmp_path: Path, scheduler: str
):
    points = ", ".join(f"{{learning_rate: {4 + i}.0e-5, group_size: 8}}" for i in range(12))
    overrides = [*QUICK, "search.trials=12", scheduler, f"enqueue=[{points}]"]
    undisturbed = load_code_spec(tmp_path / "undisturbed", overrides)
    with Ledger.open(undisturbed) as ledger:
        StepDriver(ledger, slots=1).run()
        expected = ledger.get_records()
    for life in (1, 2, 5):
        spec = load_code_spec(tmp_path / str(life), overrides)
        lives = 0
        while True:
            lives += 1
            with Ledger.open(spec) as ledger:
                try:
                    StepDriver(ledger, slots=1, dies_after=life + lives % 2).run()
                except Killed:
                    continue
                records = ledger.get_records()
                break
        assert lives > 3
        assert list_facts(records) == list_facts(expected)


def test_the_next_process_carries_out_a_pending_verdict(tmp_path: Path):
    spec = load_code_spec(tmp_path, [*QUICK, ASHA])
    with Ledger.open(spec) as ledger:
        driver = begin_search(ledger)
        good, bad = driver.ask(), driver.ask()
        report_equal(driver, good, 7, 0.9)
        report_equal(driver, bad, 7, 0.1)
        assert not (driver.in_flight[good].directory / HALT).exists()
        assert (driver.in_flight[bad].directory / HALT).exists()
        assert ledger.get_record(3).state == "running"
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        assert ledger.get_record(3).state == "pruned"
        assert ledger.get_record(3).reason == "stopped at rung 448: dominated by #2"
        assert not (ledger.get_trial_directory(3) / HALT).exists()
        assert [event.record.number for event in driver.events] == [3]
        assert driver.in_flight[driver.ask()].directory.name == "2"


@pytest.mark.parametrize("scheduler", [ASHA, PROMOTE])
def test_verdicts_on_ended_trials_are_not_decided_again(
    tmp_path: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
):
    spec = load_code_spec(tmp_path, [*QUICK, "search.trials=30", scheduler])
    with Ledger.open(spec) as ledger, pytest.raises(Killed):
        StepDriver(ledger, slots=3, dies_after=61).run()
    decided: set[int] = set()
    record = SuccessiveHalving.record

    def noted(rungs: SuccessiveHalving, number: int, *measured: Any) -> Verdict:
        decided.add(number)
        return record(rungs, number, *measured)

    monkeypatch.setattr(SuccessiveHalving, "record", noted)
    with Ledger.open(spec) as ledger:
        before = ledger.get_records()
        Driver(ledger)
    searched = [r for r in before if r.role == "search" and r.rungs]
    assert decided == {r.number for r in searched if r.is_open}
    assert any(not r.is_open for r in searched)
    assert decided


def test_a_trial_that_fails_after_a_request_to_stop_is_pruned(tmp_path: Path):
    spec = load_code_spec(tmp_path, [*QUICK, ASHA])
    with Ledger.open(spec) as ledger:
        driver = begin_search(ledger, slots=3)
        trials = [driver.ask() for _ in range(3)]
        for trial, value in zip(trials, (0.9, 0.2, 0.1), strict=True):
            report_equal(driver, trial, 7, value)
        driver.end(trials[1], failure="the disk is on fire")
        driver.in_flight.pop(trials[2])
        driver.searcher.on_end(trials[2], Failed("the trial's process died"))
        assert [ledger.get_record(number).state for number in (3, 4)] == ["pruned", "pruned"]
        assert not (ledger.get_trial_directory(3) / HALT).exists()


def test_nothing_is_promoted_once_the_budget_is_spent(tmp_path: Path):
    overrides = [*QUICK, "search.trials=30", PROMOTE, "search.budget={completions: 30000}"]
    spec = load_code_spec(tmp_path, overrides)
    with Ledger.open(spec) as ledger:
        StepDriver(ledger, slots=1).run()
        records = ledger.get_records()
    assert 3 < len(records) < 32
    assert 30000 <= sum(record.cost.completions for record in records) < 30000 + 60 * 64
    assert is_finished(spec, records)


def test_a_cost_constraint_that_is_added_later_applies_to_earlier_trials(tmp_path: Path):
    same = {"correctness": 0.5, "format": 0.5, "length": 0.5}
    with Ledger.open(load_code_spec(tmp_path, [*QUICK, ASHA])) as ledger:
        driver = begin_search(ledger, slots=3)
        for seconds in (5, 9):
            cost = Cost(completions=448, seconds=seconds)
            driver.report(driver.ask(), build_measurement(7, cost, **same))
        assert not any((c.directory / HALT).exists() for c in driver.in_flight.values())
    with Ledger.open(
        load_code_spec(tmp_path, [*QUICK, ASHA, "constraints.seconds='<= 6'"])
    ) as ledger:
        Driver(ledger)
        assert [ledger.get_record(number).state for number in (2, 3)] == ["running", "pruned"]
        assert ledger.get_record(3).reason == "stopped at rung 448: dominated by #2"


def test_a_paused_trial_at_a_removed_rung_is_closed(
    tmp_path: Path,
):
    def promoting(factor: int) -> SweepSpec:
        chosen = f"{{type: asha, variant: promote, grace: 0.2, reduction_factor: {factor}}}"
        return load_code_spec(tmp_path, [*QUICK, "search.trials=4", f"search.scheduler={chosen}"])

    def come_to(driver: Driver, trial: str, step: int, value: float) -> None:
        report_equal(driver, trial, step, value)
        if (driver.in_flight[trial].directory / HALT).exists():
            driver.end(trial, interrupted=True)

    with Ledger.open(promoting(2)) as ledger:
        driver = begin_search(ledger, slots=4)
        values = {driver.ask(): value for value in (0.9, 0.3, 0.4, 0.5)}
        first, *_, last = values
        for trial, value in values.items():
            come_to(driver, trial, 15, value)
        for trial in (first, last):
            come_to(driver, trial, 30, values[trial])
        assert [record.state for record in ledger.get_records()[2:]] == ["running", *["paused"] * 3]
        assert ledger.get_record(5).paused_at == 64 * 30
    with Ledger.open(promoting(4)) as ledger:  # compares at 15 alone
        Driver(ledger).run()
        closed = ledger.get_record(5)
    assert closed.state == "pruned"
    assert closed.reason.endswith("not promoted; stopped at rung 960: dominated by #2")


def test_measurements_after_a_verdict_are_ignored(tmp_path: Path):
    spec = load_code_spec(tmp_path, [*QUICK, PROMOTE])
    with Ledger.open(spec) as ledger:
        driver = begin_search(ledger)
        good, bad = driver.ask(), driver.ask()
        report_equal(driver, good, 7, 0.9)
        report_equal(driver, bad, 7, 0.1)
        report_equal(driver, bad, 20, 0.1)  # its workers came so far before they heard of it
        driver.end(bad, interrupted=True)
        late = ledger.get_record(3)
    assert (late.state, late.paused_at) == ("paused", 64 * 7)
    assert [rung.step for rung in late.rungs] == [7]


def test_another_scheduler_takes_over_the_trials(tmp_path: Path):
    promoting = load_code_spec(tmp_path, [*QUICK, PROMOTE])
    with Ledger.open(promoting) as ledger:
        driver = StepDriver(ledger, slots=1)
        while not any(isinstance(event, TrialPaused) for event in driver.events):
            if driver.ask() is None:
                driver.advance(next(iter(driver.in_flight)))
    with Ledger.open(promoting) as ledger:
        assert "paused" in {record.state for record in ledger.get_records()}
    plain = load_code_spec(tmp_path, [*QUICK, FIFO])
    with Ledger.open(plain) as ledger:
        StepDriver(ledger).run()
        assert {record.state for record in ledger.get_records()} == {"complete"}
