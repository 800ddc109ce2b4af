"""Drivers killed at random moments: a sweep comes to what it would have come to without."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gdpo_tune.spec import count_local_cpus
from tests.support.killed_sweeps import KilledSweep, kill_again_and_again
from tests.support.sweep_properties import check, collect_facts

FAKE = (
    "search.trials=14",
    "search.replicates={per_point: 1, max_runs: 2}",
    "training.steps=6",
    "space.reward_weights.format=1",  # no trade-off is left: most are dominated, some are promoted
)
REAL = (
    "search.trials=9",
    "search.replicates={per_point: 1, max_runs: 1}",
    "training={steps: 6, completions_per_step: 16, train_prompts: 64, validation_prompts: 8, "
    "test_prompts: 8, evaluate_every: 3, checkpoint_every: 2}",
)
STOP = "search.scheduler={type: asha, grace: 0.1, variant: stop}"
PROMOTE = "search.scheduler={type: asha, grace: 0.1, variant: promote, reduction_factor: 2}"
TPE, RANDOM = "search.sampler=tpe", "search.sampler=random"
ONE_SLOT = f"resources.cpus={count_local_cpus() / 2 + 0.5}"
TWO_SLOTS = f"resources.cpus={count_local_cpus() / 2}"


def fake(folder: Path, *overrides: str) -> KilledSweep:
    return KilledSweep(folder, (*FAKE, *overrides), fake=True)


def real(folder: Path, *overrides: str) -> KilledSweep:
    return KilledSweep(folder, (*REAL, *overrides), fake=False)


def finish_after(sweep: KilledSweep, kills: int, records: int, seed: int) -> None:
    """Kill a sweep again and again, let it end, and see to everything that has to hold then."""
    began = time.monotonic()
    if sweep.fake:
        sweep.slow_down()
    kill_again_and_again(sweep, kills, records, seed)
    sweep.finish()
    trials = len(collect_facts(sweep)["trials"])
    print(f"{kills} kills, {trials} trials, {time.monotonic() - began:.0f} s")
    check(sweep)


def assert_the_same(whole: KilledSweep, cut: KilledSweep, kills: int, seed: int) -> None:
    """One trial after the other, so what was killed has to come to the same in everything."""
    whole.finish()
    check(whole)
    finish_after(cut, kills, len(whole.read_journal()), seed)
    assert collect_facts(cut) == collect_facts(whole)


def promotions(sweep: KilledSweep) -> int:
    """Waiting trials that were let go on."""
    return sum('"waits":false' in record for record in sweep.read_journal())


def test_two_kills_change_nothing(tmp_path: Path):
    given = (ONE_SLOT, PROMOTE, RANDOM, "search.trials=8", "search.seed=7")
    whole, cut = (fake(tmp_path / name, *given) for name in ("whole", "cut"))
    assert_the_same(whole, cut, kills=2, seed=0)
    assert promotions(cut) == promotions(whole) > 0


@pytest.mark.fault
def test_kills_change_nothing_where_trials_stop(tmp_path: Path):
    whole, cut = (fake(tmp_path / name, ONE_SLOT, STOP, TPE) for name in ("whole", "cut"))
    assert_the_same(whole, cut, kills=4, seed=1)


@pytest.mark.fault
def test_kills_change_nothing_where_trials_wait(tmp_path: Path):
    given = (ONE_SLOT, PROMOTE, RANDOM, "search.seed=8")
    whole, cut = (fake(tmp_path / name, *given) for name in ("whole", "cut"))
    assert_the_same(whole, cut, kills=4, seed=2)
    assert promotions(cut) == promotions(whole) > 0


@pytest.mark.fault
@pytest.mark.parametrize("scheduler", [STOP, PROMOTE], ids=["stop", "promote"])
def test_with_two_slots_the_rungs_decide(tmp_path: Path, scheduler: str):
    sweep = fake(tmp_path, TWO_SLOTS, scheduler, RANDOM, "search.seed=7")
    finish_after(sweep, kills=3, records=90, seed=3)


@pytest.mark.fault
def test_kills_change_nothing_in_real_training_by_default(tmp_path: Path):
    whole, cut = (real(tmp_path / name, ONE_SLOT) for name in ("whole", "cut"))
    assert_the_same(whole, cut, kills=3, seed=5)


@pytest.mark.fault
def test_with_two_slots_of_real_training_the_rungs_decide(tmp_path: Path):
    finish_after(real(tmp_path, TWO_SLOTS, PROMOTE, RANDOM), kills=3, records=45, seed=6)
