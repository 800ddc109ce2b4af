"""Packs with vLLM on a CPU: one engine samples for four trials what it samples for each alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from gdpo_tune.core.errors import EngineDiedError, SharedWorkerError
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.support.packs import measure_difference, run_side_by_side, run_trial

pytestmark = pytest.mark.vllm

TRIALS = (
    {"learning_rate": 1e-3, "normalization": "gdpo", "reward_weights.digits": 2.0},
    {"learning_rate": 3e-3, "normalization": "grpo", "group_size": 8},
    {"learning_rate": 2e-3, "normalization": "dvao", "reward_weights.length": 0.3, "beta": 0.05},
    {"learning_rate": 5e-4, "normalization": "gd2po", "group_size": 2},
)
RANKS = (8, 4, 16, 2)
LARGEST = max(RANKS)
TOLERANCE = 1e-5


@pytest.fixture
def build(build_config, tmp_path):
    """Return a builder of trial `number`, in a directory of its own for each `side`."""

    def build_trial(number: int, side: str, **changes):
        params = dict(TRIALS[number])
        settings = {"model": ModelSettings(lora_rank=RANKS[number]), "engine_rank": LARGEST}
        weights = {name: params.pop(name) for name in list(params) if "." in name}
        config = build_config(steps=3, checkpoint_every=1, **params)
        return replace(
            config,
            params={**config.params, **weights},
            keep_at=(1, 2, 3),
            seed=number,
            directory=tmp_path / side / str(number),
            **{**settings, **changes},
        )

    return build_trial


@pytest.fixture
def open_pack():
    """Return a function that opens a pack, which is closed after the test."""
    from gdpo_tune.training.shared_worker import SharedWorker  # late: what it imports warns

    opened = []

    def open_one(size: int):
        opened.append(SharedWorker(size))
        return opened[-1]

    yield open_one
    for pack in opened:
        pack.close()


def run_alone(open_pack, config, resume=None):
    """Run a trial in a pack of its own, with an engine of its own."""
    pack = open_pack(1)
    run = run_trial(pack.train, config, resume)
    pack.close()
    return run


def test_four_trials_equal_the_same_trials_alone(build, open_pack, monkeypatch):
    from gdpo_tune.training.engine import Engine

    batches = []

    def generate(self, requests, on_finished=None):
        batches.append({request.adapter.lora_int_id for request in requests})
        return plain(self, requests, on_finished)

    plain = Engine.generate
    alone = [run_alone(open_pack, build(number, "alone")) for number in range(4)]
    monkeypatch.setattr(Engine, "generate", generate)
    pack = open_pack(4)
    together = run_side_by_side(
        *(functools.partial(run_trial, pack.train, build(n, "together")) for n in range(4))
    )
    differences = [measure_difference(a, b) for a, b in zip(alone, together, strict=True)]
    print(f"  largest differences of four trials: {differences}")
    assert max(differences) <= TOLERANCE
    assert {1, 2, 3, 4} in batches, "one batch for all four"
    print(f"  adapters in each batch: {[len(batch) for batch in batches]}")


def test_a_trial_in_a_pack_equals_one_with_the_engine_of_its_process(build, open_pack):
    """Of the largest rank: a smaller adapter is computed in its slot, and so rounded otherwise."""
    from gdpo_tune.training import train
    from gdpo_tune.training.engine import PROCESS_ENGINES

    number = RANKS.index(LARGEST)
    alone = run_trial(train, build(number, "alone"))
    PROCESS_ENGINES.close()
    pack = open_pack(4)
    together, _ = run_side_by_side(
        functools.partial(run_trial, pack.train, build(number, "together")),
        functools.partial(run_trial, pack.train, build(0, "together")),
    )
    difference = measure_difference(alone, together)
    print(f"  largest difference: {difference}")
    assert difference <= TOLERANCE


def test_others_do_not_notice_a_stop_and_a_resume(build, open_pack):
    """One trial is stopped after a step; its place serves another one, and it resumes at last."""
    alone = [run_alone(open_pack, build(number, "alone")) for number in range(2)]
    pack = open_pack(3)

    def stop(measurement):
        if measurement.step == 1:
            raise SystemExit

    def stop_and_resume():
        config = build(2, "together")
        first = run_trial(pack.train, config, on_report=stop)
        assert isinstance(first.error, SystemExit)
        assert run_trial(pack.train, build(3, "together")).error is None
        return run_trial(pack.train, config, find_newest_checkpoint(config.directory))

    one, other, resumed = run_side_by_side(
        functools.partial(run_trial, pack.train, build(0, "together")),
        functools.partial(run_trial, pack.train, build(1, "together")),
        stop_and_resume,
    )
    assert resumed.error is None
    assert [m.step for m in resumed.reports] == [2, 3]
    assert max(measure_difference(alone[0], one), measure_difference(alone[1], other)) <= TOLERANCE
    whole = run_alone(open_pack, build(2, "alone"))
    apart = max(
        abs(value - theirs.metrics[name])
        for ours, theirs in zip(resumed.reports, whole.reports[1:], strict=True)
        for name, value in ours.metrics.items()
    )
    print(f"  a resumed trial differs by {apart}")
    assert apart <= TOLERANCE


def test_a_rank_above_the_slots_of_the_engine_is_refused(build, open_pack):
    pack = open_pack(1)
    config = build(0, "alone", train=False)
    assert run_trial(pack.train, config).error is None
    larger = build(1, "alone", model=ModelSettings(lora_rank=32), engine_rank=32)
    refused = run_trial(pack.train, larger).error
    assert isinstance(refused, SharedWorkerError)
    assert "needs adapters of rank 32, and vLLM was started for rank 16 at most" in str(refused)


def test_an_engine_that_died_costs_its_trials_an_attempt_and_is_replaced(build, open_pack):
    pack = open_pack(2)

    def break_engine(measurement):
        if measurement.step == 1:
            with pytest.raises(ZeroDivisionError):
                pack._engine._engine.run(lambda: 1 / 0)
            pack._engine._engine.llm = None

    first = run_trial(pack.train, build(0, "together"), on_report=break_engine)
    assert isinstance(first.error, EngineDiedError)
    again = run_trial(pack.train, build(1, "together"))
    assert again.error is None
