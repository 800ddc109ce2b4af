"""Packs: a trial in one is bitwise equal to the same trial alone, whatever befalls the others."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.state import GradientState

from gdpo_tune.core import compute_lock, task_files
from gdpo_tune.core.errors import NonFiniteError, SharedWorkerError, TrialFailure
from gdpo_tune.core.settings import ModelSettings, StartSettings
from gdpo_tune.policies.adapters import hash_policy, read_initial_policy
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import train, worker_cache
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from gdpo_tune.training.shared_worker import SharedWorker, read_global_state, restore_global_state
from tests.support.packs import measure_difference, run_side_by_side, run_trial
from tests.support.training import SETTINGS, ToyTask, build_trial_config, register_toy_task

EVERY_STEP = SETTINGS.replace(steps=2, checkpoint_every=1, micro_batch_size=8)
TRIALS = (
    {"learning_rate": 1e-2, "normalization": "gdpo", "reward_weights.hits": 2.0},
    {"learning_rate": 3e-3, "normalization": "grpo", "group_size": 8},
    {"learning_rate": 2e-2, "normalization": "dvao", "reward_weights.vowels": 0.2, "beta": 0.05},
    {"learning_rate": 5e-3, "normalization": "gd2po", "group_size": 2, "num_iterations": 2},
)
"""Parameters of four trials that differ in as much as trials of a sweep may."""
RANKS = (4, 2, 8, 16)
WAIT = 60.0


class JudgedElsewhere(ToyTask):
    """The toy task, judged in a sandbox: other trials compute meanwhile, and may fail."""

    on_score = staticmethod(lambda scores: None)

    def score(self, problems, completions, lengths):
        scores = super().score(problems, completions, lengths)
        with compute_lock.yield_lock():
            time.sleep(0.001)
        JudgedElsewhere.on_score(scores)
        return scores


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    register_toy_task(monkeypatch, JudgedElsewhere)
    worker_cache.release_worker_cache()
    ToyTask.opened = ToyTask.closed = 0
    yield
    worker_cache.release_worker_cache()


@pytest.fixture
def pack():
    opened = SharedWorker(4)
    yield opened
    opened.close()


@pytest.fixture
def build(policy, tmp_path):
    """Return a builder of trial `number`, with a directory of its own."""
    places = itertools.count()

    def build_config(number: int, **changes):
        config = build_trial_config(
            policy,
            tmp_path / f"{number}-{next(places)}",
            seed=number,
            settings=EVERY_STEP,
            **TRIALS[number],
        )
        config = replace(config, keep_at=(1, 2))
        model = ModelSettings(lora_rank=RANKS[number], lora_targets=("q_proj", "down_proj"))
        return replace(config, model=model, **changes)

    return build_config


@pytest.fixture(scope="module")
def run_alone(policy, tmp_path_factory):
    """Return a function that trains trial `number` in a process of its own, once for all tests."""
    runs = {}

    def run(number: int, build):
        if number not in runs:
            directory = tmp_path_factory.mktemp("alone") / str(number)
            runs[number] = run_trial(train, replace(build(number), directory=directory))
        return runs[number]

    return run


def stop_after(step: int):
    """Return a report that asks for a stop."""

    def report(measurement):
        if measurement.step == step:
            raise SystemExit

    return report


@pytest.fixture
def harm(monkeypatch):
    """Return a function that makes `train` call another one on the scores of its own trial."""

    def build_train(train, change):
        harmed = []

        def change_own(scores):
            if threading.current_thread() in harmed:
                change(scores)

        def train_harmed(*arguments, **keywords):
            harmed.append(threading.current_thread())
            return train(*arguments, **keywords)

        monkeypatch.setattr(JudgedElsewhere, "on_score", staticmethod(change_own))
        return train_harmed

    return build_train


def test_four_trials_equal_the_same_trials_alone_bit_for_bit(pack, build, run_alone):
    alone = [run_alone(number, build) for number in range(4)]
    opened = ToyTask.opened
    started = threading.Barrier(4)

    def meet(measurement):
        if measurement.step == 1:  # all four are in the middle of their training
            started.wait(WAIT)

    together = run_side_by_side(
        *(lambda n=n: run_trial(pack.train, build(n), on_report=meet) for n in range(4))
    )
    for one, other in zip(alone, together, strict=True):
        assert measure_difference(one, other) == 0.0
    assert ToyTask.opened == opened + 1, "one task of the pack"
    seconds = [run.outcome.cost.cpu_seconds for run in together if run.outcome]
    assert min(seconds) > 0
    assert sum(seconds) < 2 * sum(run.outcome.cost.cpu_seconds for run in alone if run.outcome)


def test_each_trial_has_generators_and_gradient_accumulation_of_its_own():
    first, gradients = read_global_state(), GradientState()
    numbers = [random.random(), np.random.random(), float(torch.rand(()))]
    gradients._set_sync_gradients(not gradients.sync_gradients)
    second = read_global_state()
    restore_global_state(first)
    assert [random.random(), np.random.random(), float(torch.rand(()))] == numbers
    assert gradients.sync_gradients is first[1]["sync_gradients"]
    restore_global_state(second)
    assert gradients.sync_gradients is not first[1]["sync_gradients"]
    restore_global_state(first)


def test_the_policies_share_the_weights_below_their_adapters(pack, build, monkeypatch):
    from gdpo_tune.training import trial

    trainers = []

    def keep(config, cache):
        trainers.append(plain(config, cache)[0])
        return plain(config, cache)

    plain = trial.build_trainer
    monkeypatch.setattr(trial, "build_trainer", keep)
    for number in range(2):
        assert run_trial(pack.train, build(number)).error is None
    frozen = [
        {name: w.data_ptr() for name, w in t.policy.named_parameters() if not w.requires_grad}
        for t in trainers
    ]
    assert frozen[0] == frozen[1]
    trained = [
        {w.data_ptr() for w in t.policy.parameters() if w.requires_grad and w.numel()}
        for t in trainers
    ]
    assert not trained[0] & trained[1]


def test_others_do_not_notice_a_stop_a_failure_and_a_resume(pack, build, harm, run_alone):
    alone = [run_alone(number, build) for number in range(2)]
    stopped = build(3)

    def spoil(scores):
        scores.rewards["hits"][0] = float("nan")

    train_spoiled = harm(pack.train, spoil)

    def stop_and_resume():
        first = run_trial(pack.train, stopped, on_report=stop_after(1))
        assert isinstance(first.error, SystemExit)
        resume = find_newest_checkpoint(stopped.directory)
        return run_trial(pack.train, stopped, resume)

    one, other, failed, resumed = run_side_by_side(
        lambda: run_trial(pack.train, build(0)),
        lambda: run_trial(pack.train, build(1)),
        lambda: run_trial(train_spoiled, build(2)),
        stop_and_resume,
    )
    assert isinstance(failed.error, NonFiniteError)
    assert failed.reports == []
    assert measure_difference(alone[0], one) == 0.0
    assert measure_difference(alone[1], other) == 0.0
    whole = run_alone(3, build)
    assert resumed.error is None
    assert [m.metrics for m in resumed.reports] == [
        # A resumed run first reports the evaluation of its checkpoint again, if there is one.
        m.metrics
        for m in whole.reports[1:]
    ]
    assert resumed.outcome.test == whole.outcome.test


def test_a_place_is_free_for_the_next_trial_once_a_trial_stops(build):
    pack = SharedWorker(1)
    second_waits, order = threading.Event(), []

    def hold(measurement):
        order.append("first")
        assert second_waits.wait(WAIT)
        raise SystemExit

    def follow():
        second_waits.set()
        return run_trial(pack.train, build(1), on_report=lambda m: order.append("second"))

    def run_first():
        return run_trial(pack.train, build(0), on_report=hold)

    first, second = run_side_by_side(run_first, follow)
    pack.close()
    assert isinstance(first.error, SystemExit) or isinstance(second.error, SystemExit)
    runs = {"first": order.count("first"), "second": order.count("second")}
    assert runs == {"first": 1, "second": 2}


def test_what_trials_share_is_built_once_though_others_compute_meanwhile(pack, build, monkeypatch):
    plain = task_files.build_task

    def check_service(*arguments):
        with compute_lock.yield_lock():
            time.sleep(0.05)
        return plain(*arguments)

    monkeypatch.setattr(task_files, "build_task", check_service)
    runs = run_side_by_side(
        *(lambda n=n: run_trial(pack.train, replace(build(n), train=False)) for n in range(3))
    )
    assert [run.error for run in runs] == [None] * 3
    assert ToyTask.opened == 1


def test_the_weights_are_gone_before_the_engine_is_closed(pack, build, monkeypatch):
    assert run_trial(pack.train, replace(build(0), train=False)).error is None
    weights, left = weakref.ref(next(pack._cache.pristine.parameters())), []

    def close_engine():
        gc.collect()
        left.append(weights())

    monkeypatch.setattr(pack._engine, "close", close_engine)
    pack.close()
    assert left == [None]


def test_memory_that_ran_out_is_an_error_of_its_trial(pack, build, harm, run_alone):
    alone = run_alone(0, build)

    def run_out(scores):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    train_starved = harm(pack.train, run_out)
    run, failed = run_side_by_side(
        lambda: run_trial(pack.train, build(0)), lambda: run_trial(train_starved, build(1))
    )
    assert isinstance(failed.error, TrialFailure)
    assert "out of memory: lower resources.pack (4), or lower training.completions_per_step" in str(
        failed.error
    )
    assert measure_difference(alone, run) == 0.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": ModelSettings()}, "trials of every weight have no base policy to share"),
        ({"policy": os.devnull}, "trial differs from the other trials of its process in policy"),
        (
            {"model": ModelSettings(lora_rank=4)},
            "trial differs from the other trials of its process in model",
        ),
        ({"threads": 2}, "in resources.cpus"),
        ({"training": SETTINGS}, "in training"),
    ],
)
def test_refused_are_trials_that_cannot_share_a_process(pack, build, change, reason):
    first = replace(build(0), train=False)
    assert run_trial(pack.train, first).error is None
    refused = run_trial(pack.train, replace(build(1), **change)).error
    assert isinstance(refused, SharedWorkerError)
    assert reason.removeprefix("trial ") in str(refused)
    assert "fix: " in str(refused)
    assert run_trial(pack.train, first).error is None, "the pack goes on"


def test_a_finished_trial_is_evaluated_again_in_the_pack(pack, build):
    config = build(0)
    first = run_trial(pack.train, config)
    again = run_trial(pack.train, config, find_newest_checkpoint(config.directory))
    assert again.error is None
    assert again.outcome.test == first.outcome.test


def test_a_start_and_the_trials_after_it_pass_through_one_process(pack, build, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "ta=", "completion": "ae"}\n' * 4)
    settings = StartSettings(demonstrations=str(tmp_path / "mine.jsonl"), steps=2)
    training = SETTINGS.replace(steps=2, dead_steps=0)
    made = run_trial(pack.train, replace(build(0), supervised=settings, training=training))
    assert made.error is None
    start = made.outcome.checkpoint
    assert run_trial(pack.train, replace(build(3), train=False)).error is None
    later = [replace(build(number), start=start) for number in (1, 2)]
    runs = run_side_by_side(*(lambda c=config: run_trial(pack.train, c) for config in later))
    assert [run.error for run in runs] == [None, None]
    digests = {read_initial_policy(run.outcome.checkpoint) for run in runs}
    assert digests == {hash_policy(load_policy(str(start))[0])}
    assert read_initial_policy(start) not in digests
