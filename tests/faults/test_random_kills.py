"""Drivers killed at random moments: a sweep has the same result as without kills."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.spec.first_trials import find_wide_step
from tests.support.killed_sweeps import KilledSweep, kill_repeatedly
from tests.support.sweep_properties import check_sweep, collect_facts

FAKE = (
    "search.trials=14",
    "search.replicates={per_point: 1, max_runs: 2}",
    "training.steps=6",
)
REAL = (
    "search.trials=9",
    "search.replicates={per_point: 1, max_runs: 1}",
    "training={steps: 6, completions_per_step: 16, train_prompts: 64, validation_prompts: 8, "
    "test_prompts: 8, evaluate_every: 3, checkpoint_every: 2}",
)
TPE, RANDOM = "search.sampler=tpe", "search.sampler=random"
ONE_SLOT = f"resources.cpus={count_local_cpus() / 2 + 0.5}"
TWO_SLOTS = f"resources.cpus={count_local_cpus() / 2}"


MERGES = (
    "search={trials: 8, merges: {budget: 10}, checkpoints: {budget: 2}}",
    "search.replicates={per_point: 1, max_runs: 3}",
    "training.steps=4",
    "constraints={}",
    "space.reward_weights.format={log: [0.05, 2]}",
)


HALVING = (
    "search={budget: {completions: 9600}, merges: {budget: 6}, checkpoints: {budget: 2}}",
    "search.replicates={per_point: 1, max_runs: 2}",
    "training={steps: 16, evaluate_every: 16, validation_prompts: 32}",
    "constraints={}",
)
REAL_HALVING = (
    "search={budget: {completions: 1920}, replicates: {per_point: 1, max_runs: 1}}",
    "training={steps: 12, completions_per_step: 16, train_prompts: 64, validation_prompts: 8, "
    "test_prompts: 8, evaluate_every: 12, checkpoint_every: 2}",
)


def build_fake_sweep(directory: Path, *overrides: str) -> KilledSweep:
    return KilledSweep(directory, (*FAKE, *overrides), fake=True)


def build_real_sweep(directory: Path, *overrides: str) -> KilledSweep:
    return KilledSweep(directory, (*REAL, *overrides), fake=False)


def finish_after(sweep: KilledSweep, kills: int, records: int, seed: int) -> None:
    """Kill a sweep repeatedly, run it to its end and check its properties."""
    began = time.monotonic()
    if sweep.fake:
        sweep.slow_down()
    kill_repeatedly(sweep, kills, records, seed)
    sweep.finish()
    trials = len(collect_facts(sweep)["trials"])
    print(f"{kills} kills, {trials} trials, {time.monotonic() - began:.0f} s")
    check_sweep(sweep)


def check_same_facts(whole: KilledSweep, killed: KilledSweep, kills: int, seed: int) -> None:
    """Check that a killed sweep has the same facts as one without kills; trials run one by one."""
    whole.finish()
    check_sweep(whole)
    finish_after(killed, kills, len(whole.read_journal()), seed)
    assert collect_facts(killed) == collect_facts(whole)


def count_continued(sweep: KilledSweep) -> int:
    """Count how often a waiting trial went on."""
    return sum('"waits":false' in record for record in sweep.read_journal())


@pytest.mark.system
@pytest.mark.slow  # test_sweeps kills and interrupts a sweep in CI
def test_two_kills_change_nothing(tmp_path: Path):
    overrides = (ONE_SLOT, *HALVING, RANDOM, "search.merges.budget=0", "search.seed=7")
    whole, cut = (KilledSweep(tmp_path / name, overrides, fake=True) for name in ("whole", "cut"))
    check_same_facts(whole, cut, kills=2, seed=0)
    assert count_continued(cut) == count_continued(whole) > 0


@pytest.mark.fault
@pytest.mark.parametrize("sampler", [TPE, RANDOM], ids=["tpe", "random"])
def test_kills_change_nothing_where_all_run_to_their_end(tmp_path: Path, sampler: str):
    whole, cut = (
        build_fake_sweep(tmp_path / name, ONE_SLOT, sampler, "search.seed=8")
        for name in ("whole", "cut")
    )
    check_same_facts(whole, cut, kills=4, seed=1)


@pytest.mark.fault
def test_kills_change_nothing_in_real_training_by_default(tmp_path: Path):
    whole, cut = (build_real_sweep(tmp_path / name, ONE_SLOT) for name in ("whole", "cut"))
    check_same_facts(whole, cut, kills=3, seed=5)


@pytest.mark.fault
@pytest.mark.parametrize("slots", [ONE_SLOT, TWO_SLOTS], ids=["one", "two"])
def test_kills_neither_repeat_nor_lose_a_merge(tmp_path: Path, slots: str):
    overrides = (slots, *MERGES, RANDOM, "search.seed=3")
    whole, cut = (build_fake_sweep(tmp_path / name, *overrides) for name in ("whole", "cut"))
    whole.finish()
    check_sweep(whole)
    roles = [trial["role"] for trial in collect_facts(whole)["trials"]]
    assert roles.count("merge") >= 5
    finish_after(cut, kills=10, records=len(whole.read_journal()), seed=7)
    if slots == ONE_SLOT:
        assert collect_facts(cut) == collect_facts(whole)


@pytest.mark.fault
@pytest.mark.parametrize("slots", [ONE_SLOT, TWO_SLOTS], ids=["one", "two"])
def test_kills_change_nothing_where_a_budget_is_divided(tmp_path: Path, slots: str):
    overrides = (slots, *HALVING, RANDOM, "search.seed=3")
    whole, cut = (KilledSweep(tmp_path / name, overrides, fake=True) for name in ("whole", "cut"))
    whole.finish()
    check_sweep(whole)
    trials = collect_facts(whole)["trials"]
    lengths = {trial["rungs"][-1][0] for trial in trials if trial["role"] == "search"}
    assert min(lengths) == find_wide_step(whole.spec) < max(lengths), "some waited, and went on"
    assert {trial["state"] for trial in trials if trial["role"] == "merge"} >= {"complete"}
    finish_after(cut, kills=10, records=len(whole.read_journal()), seed=7)
    if slots == ONE_SLOT:
        assert collect_facts(cut) == collect_facts(whole)


@pytest.mark.fault
def test_with_two_slots_of_real_training_the_rungs_decide(tmp_path: Path):
    sweep = KilledSweep(tmp_path, (TWO_SLOTS, *REAL_HALVING, RANDOM), fake=False)
    finish_after(sweep, kills=3, records=45, seed=6)
