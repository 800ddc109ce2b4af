"""The sampler's study of trials that were stopped at a rung."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState

from gdpo_tune.core.trials import Cost, Rung, State, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.proposals import SamplerView, count_used
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path)


def build_rung(step: int, value: float) -> Rung:
    return Rung(
        step,
        build_measurement(step, **build_equal_values(value)).validation,
        Cost(completions=64 * step),
    )


def build_equal_values(value: float) -> dict[str, float]:
    return {"correctness": value, "format": value, "length": value}


def build_record(
    spec: SweepSpec, number: int, state: State, *rungs: tuple[int, float], end: float | None = None
) -> TrialRecord:
    """Build a trial with its own configuration and equal values of all metrics."""
    params = {**spec.space.complete_baseline({}), "learning_rate": 3e-5 + number * 1e-6}
    return TrialRecord(
        number,
        "search",
        state,
        params,
        seed=number,
        proposer="model",
        validation={} if end is None else build_outcome(**build_equal_values(end)).validation,
        rungs=tuple(build_rung(*point) for point in rungs),
        finished=float(number) if state in ("complete", "pruned") else None,
    )


def list_entries(projection: SamplerView) -> dict[int, tuple[str, float | None]]:
    """Return the number of each trial -> state and value of its entry."""
    trials = [t for t in projection.study.trials if t.state != TrialState.FAIL]
    by_number = {round((t.params["learning_rate"] - 3e-5) * 1e6): t for t in trials}
    return {
        number: (t.state.name, None if t.values is None else round(t.values[0], 9))
        for number, t in by_number.items()
    }


def test_a_stopped_trial_counts_as_its_rung_plus_the_median_change_to_the_end(spec: SweepSpec):
    projection = SamplerView(spec)
    projection.observe(build_record(spec, 0, "pruned", (7, 0.1)))
    assert list_entries(projection) == {0: ("COMPLETE", 0.1)}, "no complete trial has that rung yet"
    changes = [0.1, 0.5, 0.2]
    for number, change in enumerate(changes, 1):
        projection.observe(
            build_record(
                spec, number, "complete", (7, 0.3), (20, 0.3 + change / 2), end=0.3 + change
            )
        )
    projection.observe(build_record(spec, 4, "pruned", (7, 0.1), (20, 0.25)))
    assert {n: list_entries(projection)[n] for n in (0, 4)} == {
        0: ("COMPLETE", 0.3),
        4: ("COMPLETE", 0.35),
    }


def test_constraints_are_extrapolated_like_objectives(spec: SweepSpec):
    projection = SamplerView(spec)
    projection.observe(build_record(spec, 0, "pruned", (7, 0.1)))
    projection.observe(build_record(spec, 1, "complete", (7, 0.3), end=0.45))
    guessed = next(t for t in projection.study.trials if t.values == pytest.approx([0.25] * 3))
    assert guessed.constraints["correctness"] == pytest.approx(0.2 - 0.25)


def test_a_running_trial_is_in_the_study_from_its_first_rung_on(spec: SweepSpec):
    projection = SamplerView(spec)
    projection.observe(build_record(spec, 0, "running"))
    assert list_entries(projection) == {0: ("RUNNING", None)}
    projection.observe(build_record(spec, 0, "running", (7, 0.1)))
    assert list_entries(projection) == {0: ("COMPLETE", 0.1)}
    projection.observe(build_record(spec, 1, "complete", (7, 0.3), (20, 0.4), end=0.5))
    projection.observe(build_record(spec, 0, "running", (7, 0.1), (20, 0.2)))
    assert list_entries(projection) == {0: ("COMPLETE", 0.3), 1: ("COMPLETE", 0.5)}


def test_a_paused_trial_of_a_large_sweep_stays_in_the_study_when_it_resumes(tmp_path: Path):
    spec = load_code_spec(tmp_path, ["search.trials=301"])
    projection = SamplerView(spec)
    running = build_record(spec, 0, "running", (7, 0.1))
    projection.observe(running)
    assert list_entries(projection) == {0: ("RUNNING", None)}
    waiting = replace(running, state="paused", paused_at=448)
    projection.observe(waiting)
    assert list_entries(projection) == {0: ("COMPLETE", 0.1)}
    projection.observe(replace(waiting, state="running"))
    assert list_entries(projection) == {0: ("COMPLETE", 0.1)}
    projection.observe(build_record(spec, 0, "complete", (7, 0.1), (20, 0.2), end=0.4))
    assert list_entries(projection) == {0: ("COMPLETE", 0.4)}


def test_a_complete_replicate_counts_more_than_a_stopped_one(spec: SweepSpec):
    projection = SamplerView(spec)
    stopped = build_record(spec, 0, "pruned", (7, 0.1))
    projection.observe(stopped)
    again = build_record(spec, 1, "complete", end=0.6)
    projection.observe(replace(again, params=stopped.params))
    assert list_entries(projection) == {0: ("COMPLETE", 0.6)}


def test_a_new_process_builds_the_same_study(spec: SweepSpec):
    numbers = random.Random(0)
    records: list[TrialRecord] = []
    for number in range(60):
        value, change = numbers.random() / 2, numbers.random() / 2
        if number % 3:
            records.append(build_record(spec, number, "pruned", (7, value)))
        else:
            records.append(build_record(spec, number, "complete", (7, value), end=value + change))
        if number % 7 == 6:
            watching, loading = SamplerView(spec), SamplerView(spec)
            for record in records:
                watching.observe(record)
            loading.load((record, {}) for record in records)
            assert list_entries(watching) == list_entries(loading)


def test_the_extrapolation_changes_in_steps():
    counts = [count_used(count) for count in range(200)]
    assert counts[:9] == list(range(9))
    assert counts == sorted(counts)
    assert all(leap <= count < max(9, leap * 1.25 + 1) for count, leap in enumerate(counts))
    assert len(set(counts)) < 25


SMALL = """
task: code
objectives:
  correctness: {direction: maximize, reference: 0}
  format: {direction: maximize, reference: 0}
space: {normalization: [gdpo, grpo], group_size: [4, 8]}
search: {trials: 4, sampler: random, scheduler: {type: asha}}
"""


def test_a_stopped_configuration_is_not_proposed_again(tmp_path: Path):
    (tmp_path / "small.yaml").write_text(SMALL)
    spec = load_code_spec(tmp_path, [], tmp_path / "small.yaml")
    projection = SamplerView(spec)
    proposed: list[object] = []
    for number in range(4):
        params = projection.propose().params
        proposed.append(params)
        stopped = TrialRecord(number, "search", "pruned", params, number, "model")
        projection.observe(replace(stopped, rungs=(build_rung(7, 0.1),)))
    assert all(proposed.count(params) == 1 for params in proposed)


@pytest.mark.system
def test_at_least_half_of_the_suggestions_come_from_the_model(tmp_path: Path):
    overrides = [
        "search.scheduler={type: asha, grace: 0.1}",
        "search.trials=16",
        "search.replicates.max_runs=0",
    ]
    with Ledger.open(load_code_spec(tmp_path, overrides)) as ledger:
        driver = Driver(ledger)
        while (answer := driver.ask()) != driver.searcher.FINISHED:
            if answer is None and driver.in_flight:
                trial = next(iter(driver.in_flight))
                config = driver.in_flight[trial]
                value = 0.3 + 1000 * float(config.params["learning_rate"])
                if config.evaluate_at:
                    driver.report(trial, build_measurement(7, **build_equal_values(value)))
                halted = (config.directory / "halt").exists()
                driver.end(trial, **({"interrupted": True} if halted else {}))
        records = [record for record in ledger.get_records() if record.role == "search"]
        driver.searcher.close()
    assert "pruned" in {record.state for record in records}
    assert sum(record.proposer == "model" for record in records) >= 8


def test_the_sampler_sees_rungs_before_any_trial_ends(tmp_path: Path):
    overrides = ["search.sampler=tpe", "search.trials=24"]
    with Ledger.open(load_code_spec(tmp_path, overrides)) as ledger:
        driver = Driver(ledger, slots=8)
        while len(driver.in_flight) < 7:
            driver.ask()
        for trial in driver.in_flight:
            driver.report(trial, build_measurement(7, **build_equal_values(0.3)))
        while len(driver.in_flight) < 8:
            driver.ask()
        newest = ledger.get_records()[-1]
        driver.searcher.close()
    assert newest.proposer == "model"
