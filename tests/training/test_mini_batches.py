"""Mini-batches: several optimizer steps on the samples of a step, those of TRL's own division."""

from __future__ import annotations

import itertools

import pytest
import torch

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.training import fast_cpu, micro_batches, train, trial
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support.gradients import ROWS, KeptGradients, assert_same_steps, run_two_steps
from tests.support.training import (
    SETTINGS,
    build_trial_config,
    have_same_weights,
    mark_slow_cases,
    stop_after,
)

MINI = 8
LOSS_TYPES = PARAMETERS["loss_type"].choices
NAMES = ("hits", "vowels", "length")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Against TRL's own mini-batches


EVERY = list(itertools.product(LOSS_TYPES, (0.0, 0.5), (1, 2)))
QUICK = [(loss_type, 0.5, 1) for loss_type in LOSS_TYPES] + [("dapo", 0.0, 2)]


@pytest.mark.parametrize(("loss_type", "beta", "passes"), mark_slow_cases(EVERY, QUICK))
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_mini_batches_in_micro_batches_are_those_of_trl(
    policy, tmp_path, monkeypatch, loss_type, beta, passes, padded
):
    changes = {"loss_type": loss_type, "beta": beta, "learning_rate": 0.3, "num_iterations": passes}
    with monkeypatch.context() as patch:
        # TRL's own order, padding and division: one micro-batch is one mini-batch.
        patch.setattr(fast_cpu, "can_pack", lambda _: False)
        patch.setattr(micro_batches, "find_obstacle", lambda _: "a test")
        patch.setattr(micro_batches, "cut_padding", lambda batch: batch)
        expected = run_two_steps(policy, tmp_path, MINI, MINI, **changes)
    if padded:
        monkeypatch.setattr(fast_cpu, "can_pack", lambda _: False)
    run = run_two_steps(policy, tmp_path, 2, MINI, **changes)
    assert run.updates_per_step == passes * ROWS // MINI
    assert [len(each) for each in run.advantages] == [ROWS, ROWS], "over all of a step"
    assert len(run.kept.gradients) == 2 * passes * ROWS // MINI
    assert_same_steps(run, expected, rel=1e-4)


def test_the_clip_acts_from_the_second_mini_batch_on(policy, tmp_path):
    run = run_two_steps(policy, tmp_path, 4, MINI, learning_rate=3.0, epsilon=0.01, beta=0.0)
    first, second, *_ = [logs["clip_ratio/region_mean"] for logs in run.kept.logs]
    assert first == 0
    assert second > 0


# In a trial


def settings(**changes):
    return SETTINGS.replace(**changes)


def run(config, resume=None):
    reports = []
    outcome = train(config, resume=resume, report=lambda m, _: reports.append((m.step, m.metrics)))
    return [(step, metrics) for step, metrics in reports if metrics], outcome


@pytest.mark.parametrize(
    ("mini", "micro", "expected"),
    [
        (0, 0, (16, 1, 1, 6)),
        (16, 0, (16, 1, 1, 6)),
        (0, "auto", (16, 1, 1, 6)),
        (0, 4, (16, 1, 1, 6)),
        (8, "auto", (8, 1, 2, 12)),
        (8, 4, (8, 1, 2, 12)),
        (4, 1, (4, 1, 4, 24)),
    ],
)
def test_the_setting_becomes_arguments_of_TRL(policy, tmp_path, toy, mini, micro, expected):
    parts = settings(mini_batch_size=mini, micro_batch_size=micro, warmup_share=1 / 3)
    config = build_trial_config(policy, tmp_path, settings=parts, num_iterations=2)
    arguments = build_trainer_arguments(config, NAMES)
    assert (
        arguments.per_device_train_batch_size,
        arguments.gradient_accumulation_steps,
        arguments.steps_per_generation,
        arguments.max_steps,
    ) == expected
    assert arguments.generation_batch_size == 16
    assert arguments.warmup_steps == arguments.max_steps // 3


@pytest.mark.parametrize(
    ("mini", "micro", "message"),
    [
        (5, 0, "mini_batch_size 5 does not divide the 16 completions of a step"),
        (32, 0, "mini_batch_size 32 does not divide the 16 completions of a step"),
    ],
)
def test_a_size_that_does_not_divide_ends_the_trial(policy, tmp_path, toy, mini, micro, message):
    parts = settings(mini_batch_size=mini, micro_batch_size=micro)
    with pytest.raises(TrialFailure, match=message):
        run(build_trial_config(policy, tmp_path / "t", settings=parts))


def test_each_step_samples_once_and_is_reported_once(policy, tmp_path, toy, monkeypatch):
    samples, updates = [], []
    build_inner = trial.build_trainer

    def build_watched(config, cache):
        trainer, sampler = build_inner(config, cache)
        inner = trainer._generate_and_score_completions
        watched = KeptGradients()
        watched.on_pre_optimizer_step = lambda *_, **__: updates.append(trainer.state.global_step)
        trainer.add_callback(watched)
        trainer._generate_and_score_completions = lambda rows: (
            samples.append(len(rows)) or inner(rows)
        )
        return trainer, sampler

    monkeypatch.setattr("gdpo_tune.training.trial.build_trainer", build_watched)
    parts = settings(mini_batch_size=4, micro_batch_size=2, lr_schedule="linear")
    config = build_trial_config(policy, tmp_path, settings=parts, num_iterations=2)
    reports, outcome = run(config)
    assert [step for step, _ in reports] == [1, 2, 3]
    assert samples == [16, 16, 16]
    assert updates == list(range(24))
    rates = [metrics["train/learning_rate"] for _, metrics in reports]
    # The mean over the 8 optimizer steps of each step, on a line from 0.01 to 0 over 24.
    assert rates == pytest.approx([0.01 * (1 - (8 * step + 3.5) / 24) for step in range(3)])
    assert outcome.cost.completions == 48


@pytest.mark.parametrize(("stop", "passes"), mark_slow_cases([(3, 1), (3, 2), (5, 2)], [(3, 2)]))
def test_a_resumed_trial_in_mini_batches_is_bitwise_equal(policy, tmp_path, toy, stop, passes):
    # 3 steps of 4 prompts pass over 12 prompts, so a resume also crosses that boundary.
    parts = settings(
        steps=stop + 1,
        lr_schedule="cosine",
        warmup_share=0.3,
        mini_batch_size=8,
        micro_batch_size=4,
    )
    parameters = {"num_iterations": passes, "beta": 0.01, "settings": parts}
    whole, expected = run(build_trial_config(policy, tmp_path / "whole", **parameters))
    config = build_trial_config(policy, tmp_path / "cut", **parameters)
    newest = stop_after(config, stop)
    assert newest.name == f"checkpoint-{stop}"
    torch.rand(3)
    rest, outcome = run(config, resume=newest)
    assert rest == whole[stop:]
    assert (outcome.validation, outcome.test) == (expected.validation, expected.test)
    assert have_same_weights(outcome.checkpoint, expected.checkpoint)
