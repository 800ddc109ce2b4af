"""A population on a real Ray: real training of the embedded policy, and a killed driver."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.retrain import build_request_from_sweep, build_trial_config
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training import train, worker_cache
from gdpo_tune.tuning.runner import run_sweep
from tests.support.fake_training import list_executions
from tests.support.ray_sweeps import MARKS, SPACE, start_sweep, wait_until, write_faults
from tests.support.tuning import ENDS_ONLY

pytestmark = MARKS

TRAIN = "tests.support.fake_training:train"
MEMBERS = 4
POPULATION = [
    *ENDS_ONLY,
    f"search={{trials: {MEMBERS}, scheduler: {{type: pbt, interval: 0.5}}}}",
    "search.replicates.max_runs=1",
]
TINY = (
    "training={steps: 4, completions_per_step: 16, train_prompts: 64, validation_prompts: 8, "
    "test_prompts: 8, evaluate_every: 4, checkpoint_every: 3}"
)


@pytest.mark.slow
def test_a_member_of_a_real_population_is_one_training_bit_for_bit(tmp_path: Path):
    spec = load_spec(SPACE, [f"storage={tmp_path}", *POPULATION, TINY], "sweep")
    result = run_sweep(spec)
    records = result.records
    members = [record for record in records if record.role == "member"]
    assert not result.exit_status
    assert {record.state for record in records} == {"complete"}
    assert len(members) == MEMBERS
    with Ledger.open(spec, read_only=True) as ledger:
        (generation,) = ledger.get_generations()
    assert generation.step == 2
    (exploit,) = generation.exploits
    taker = records[exploit.member]
    assert taker.lineage == (exploit,)
    assert {"learning_rate", "reward_weights.format"} < set(exploit.params)
    assert taker.directory is not None
    rates = [m.metrics["train/learning_rate"] for m in read_steps(taker.directory)]
    own, new = taker.params["learning_rate"], exploit.params["learning_rate"]
    assert rates == pytest.approx([own, own, new, new])

    request = build_request_from_sweep(f"{spec.directory}:{taker.number}", [])
    config = build_trial_config(request, seed=None, out=tmp_path / "again", threads=None)
    try:
        outcome = train(config, resume=None, report=lambda *_: None)
    finally:
        worker_cache.release_worker_cache()
    assert (outcome.validation, outcome.test) == (taker.validation, taker.test)
    replay = read_steps(tmp_path / "again")
    metrics = {m.step: m.metrics for m in read_steps(taker.directory)}
    assert [m.metrics for m in replay[2:]] == [metrics[3], metrics[4]]
    donor = records[exploit.donor].directory
    assert donor is not None
    before = {m.step: dict(m.metrics) for m in read_steps(donor)}
    assert replay[0].metrics == before[1]
    assert {**replay[1].metrics, **before[2]} == before[2]


def load_population_spec(directory: Path) -> SweepSpec:
    return load_spec(SPACE, list_overrides(directory), "sweep")


def list_overrides(directory: Path) -> list[str]:
    return [f"storage={directory}", *POPULATION, "training.steps=4"]


def collect_results(spec: SweepSpec) -> object:
    """Collect the results of a population, without times."""
    with Ledger.open(spec, read_only=True) as ledger:
        records = [r for r in ledger.get_records() if r.role == "member"]
        states = [(r.number, r.state, r.validation, r.lineage) for r in records]
        return states, [dataclasses.asdict(g) for g in ledger.get_generations()]


@pytest.mark.fault
def test_a_population_whose_driver_is_killed_has_the_same_result(tmp_path: Path):
    whole, cut = load_population_spec(tmp_path / "whole"), load_population_spec(tmp_path / "cut")
    run_sweep(whole, train=TRAIN)
    write_faults(cut, all="slow")
    trials = cut.directory / "trials"
    for moment in ("3/checkpoint-1", "5/checkpoint-2", "4/checkpoint-3"):
        with start_sweep(TRAIN, *list_overrides(tmp_path / "cut")) as process:
            wait_until((trials / moment).exists)
            assert process.poll() is None, f"the sweep ended before {moment}"
            process.kill()
    write_faults(cut)
    run_sweep(cut, train=TRAIN)
    assert collect_results(cut) == collect_results(whole)
    with Ledger.open(cut, read_only=True) as ledger:
        assert {trial.state.name for trial in ledger.study.trials} == {"COMPLETE"}
    begun = [entry["trial"] for entry in list_executions(cut.directory) if entry["from"] == 0]
    assert all(begun.count(str(number)) <= 2 for number in range(2, 2 + MEMBERS))
