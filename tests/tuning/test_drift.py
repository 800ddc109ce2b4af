"""What a sampler sees of trials that were stopped at a rung."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState

from gdpo_tune.core.trials import Cost, Rung, State, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.search.drift import count_used
from gdpo_tune.tuning.search.projection import Projection
from tests.support.search_driver import Driver
from tests.support.tuning import measured, outcome, spec_in


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return spec_in(tmp_path)


def rung(step: int, value: float) -> Rung:
    return Rung(step, measured(step, **same(value)).validation, Cost(completions=64 * step))


def same(value: float) -> dict[str, float]:
    return {"correctness": value, "format": value, "length": value}


def record(
    spec: SweepSpec, number: int, state: State, *rungs: tuple[int, float], end: float | None = None
) -> TrialRecord:
    """A trial with a configuration of its own, all metrics alike."""
    params = {**spec.space.complete_baseline({}), "learning_rate": 3e-5 + number * 1e-6}
    return TrialRecord(
        number,
        "search",
        state,
        params,
        seed=number,
        proposer="model",
        validation={} if end is None else outcome(**same(end)).validation,
        rungs=tuple(rung(*given) for given in rungs),
        finished=float(number) if state in ("complete", "pruned") else None,
    )


def seen(projection: Projection) -> dict[int, tuple[str, float | None]]:
    """Number of the trial -> state and value of its entry."""
    trials = [t for t in projection.study.trials if t.state != TrialState.FAIL]
    by_number = {round((t.params["learning_rate"] - 3e-5) * 1e6): t for t in trials}
    return {
        number: (t.state.name, None if t.values is None else round(t.values[0], 9))
        for number, t in by_number.items()
    }


def test_a_stopped_trial_stands_at_its_rung_plus_the_median_change_to_the_end(spec: SweepSpec):
    projection = Projection(spec)
    projection.observe(record(spec, 0, "pruned", (7, 0.1)))
    assert seen(projection) == {0: ("COMPLETE", 0.1)}, "no complete trial has that rung yet"
    changes = [0.1, 0.5, 0.2]
    for number, change in enumerate(changes, 1):
        projection.observe(
            record(spec, number, "complete", (7, 0.3), (20, 0.3 + change / 2), end=0.3 + change)
        )
    projection.observe(record(spec, 4, "pruned", (7, 0.1), (20, 0.25)))
    assert {n: seen(projection)[n] for n in (0, 4)} == {
        0: ("COMPLETE", 0.3),
        4: ("COMPLETE", 0.35),
    }


def test_constraints_are_guessed_like_objectives(spec: SweepSpec):
    projection = Projection(spec)
    projection.observe(record(spec, 0, "pruned", (7, 0.1)))
    projection.observe(record(spec, 1, "complete", (7, 0.3), end=0.45))
    guessed = next(t for t in projection.study.trials if t.values == pytest.approx([0.25] * 3))
    assert guessed.constraints["correctness"] == pytest.approx(0.2 - 0.25)


def test_a_trial_under_way_is_known_from_its_first_rung_on(spec: SweepSpec):
    projection = Projection(spec)
    projection.observe(record(spec, 0, "running"))
    assert seen(projection) == {0: ("RUNNING", None)}
    projection.observe(record(spec, 0, "running", (7, 0.1)))
    assert seen(projection) == {0: ("COMPLETE", 0.1)}
    projection.observe(record(spec, 1, "complete", (7, 0.3), (20, 0.4), end=0.5))
    projection.observe(record(spec, 0, "running", (7, 0.1), (20, 0.2)))
    assert seen(projection) == {0: ("COMPLETE", 0.3), 1: ("COMPLETE", 0.5)}


def test_a_waiting_trial_of_a_large_sweep_is_known_and_stays_so_when_it_goes_on(tmp_path: Path):
    spec = spec_in(tmp_path, ["search.trials=301"])
    projection = Projection(spec)
    running = record(spec, 0, "running", (7, 0.1))
    projection.observe(running)
    assert seen(projection) == {0: ("RUNNING", None)}
    waiting = replace(running, state="paused", paused_at=448)
    projection.observe(waiting)
    assert seen(projection) == {0: ("COMPLETE", 0.1)}
    projection.observe(replace(waiting, state="running"))
    assert seen(projection) == {0: ("COMPLETE", 0.1)}
    projection.observe(record(spec, 0, "complete", (7, 0.1), (20, 0.2), end=0.4))
    assert seen(projection) == {0: ("COMPLETE", 0.4)}


def test_a_seed_that_ran_to_its_end_counts_more_than_one_that_was_stopped(spec: SweepSpec):
    projection = Projection(spec)
    stopped = record(spec, 0, "pruned", (7, 0.1))
    projection.observe(stopped)
    again = record(spec, 1, "complete", end=0.6)
    projection.observe(replace(again, params=stopped.params))
    assert seen(projection) == {0: ("COMPLETE", 0.6)}


def test_a_new_process_sees_the_same(spec: SweepSpec):
    numbers = random.Random(0)
    records: list[TrialRecord] = []
    for number in range(60):
        value, change = numbers.random() / 2, numbers.random() / 2
        if number % 3:
            records.append(record(spec, number, "pruned", (7, value)))
        else:
            records.append(record(spec, number, "complete", (7, value), end=value + change))
        if number % 7 == 6:
            watching, loading = Projection(spec), Projection(spec)
            for known in records:
                watching.observe(known)
            loading.load((known, {}) for known in records)
            assert seen(watching) == seen(loading)


def test_the_guess_moves_in_leaps():
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
    spec = spec_in(tmp_path, [], tmp_path / "small.yaml")
    projection = Projection(spec)
    proposed: list[object] = []
    for number in range(4):
        params = projection.propose().params
        proposed.append(params)
        stopped = TrialRecord(number, "search", "pruned", params, number, "model")
        projection.observe(replace(stopped, rungs=(rung(7, 0.1),)))
    assert all(proposed.count(params) == 1 for params in proposed)


def test_at_least_half_of_the_suggestions_come_from_the_model(tmp_path: Path):
    given = [
        "search.scheduler={type: asha, grace: 0.1}",
        "search.trials=16",
        "search.replicates.max_runs=0",
    ]
    with Ledger.open(spec_in(tmp_path, given)) as ledger:
        driver = Driver(ledger)
        while (answer := driver.ask()) != driver.searcher.FINISHED:
            if answer is None and driver.flying:
                trial = next(iter(driver.flying))
                config = driver.flying[trial]
                value = 0.3 + 1000 * float(config.params["learning_rate"])
                if config.evaluate_at:
                    driver.report(trial, measured(7, **same(value)))
                halted = (config.directory / "halt").exists()
                driver.end(trial, **({"interrupted": True} if halted else {}))
        records = [record for record in ledger.get_records() if record.role == "search"]
        driver.searcher.close()
    assert "pruned" in {record.state for record in records}
    assert sum(record.proposer == "model" for record in records) >= 8


def test_the_sampler_hears_of_rungs_before_any_trial_is_at_its_end(tmp_path: Path):
    given = ["search.sampler=tpe", "search.trials=24"]
    with Ledger.open(spec_in(tmp_path, given)) as ledger:
        driver = Driver(ledger, slots=8)
        while len(driver.flying) < 7:
            driver.ask()
        for trial in driver.flying:
            driver.report(trial, measured(7, **same(0.3)))
        while len(driver.flying) < 8:
            driver.ask()
        newest = ledger.get_records()[-1]
        driver.searcher.close()
    assert newest.proposer == "model"
