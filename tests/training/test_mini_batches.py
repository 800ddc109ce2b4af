"""Mini-batches: several optimizer steps on the samples of a step, those of TRL's own division."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.trial_config import Segment
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import fast_cpu, train, trial
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support.gradients import KeptGradients, short, vowels
from tests.support.training import (
    SETTINGS,
    build_plain_trainer,
    build_trial_config,
    mark_slow_cases,
)

ROWS, MINI = 16, 8
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


def run_two_steps(policy, tmp_path, micro, passes, **changes):
    """Run two steps in mini-batches of `MINI`; return gradients and logs, and completions."""
    sampled, advantages = [], []

    def kept_rollout(prompts, trainer):
        drawn = sample_for_trainer(prompts, trainer)
        sampled.append(drawn["completion_ids"])
        return drawn

    trainer = build_plain_trainer(
        policy,
        tmp_path,
        cls=GDPOTrainer,
        normalization="gdpo",
        reward_funcs=[vowels, short],
        rollout_func=kept_rollout,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=MINI // micro,
        steps_per_generation=ROWS // micro,
        num_iterations=passes,
        max_steps=2 * passes * ROWS // MINI,
        max_grad_norm=1e9,  # nothing is scaled, so that gradients are those of the loss
        optim="sgd",  # Adam would enlarge the rounding error of gradients near 0
        **changes,
    )
    compute = trainer._compute_advantages

    def kept_advantages(rewards, weights, group_size):
        advantages.append(compute(rewards, weights, group_size))
        return advantages[-1]

    trainer._compute_advantages = kept_advantages
    kept = KeptGradients()
    trainer.add_callback(kept)
    trainer.train()
    assert trainer.updates_per_step == passes * ROWS // MINI
    return kept, sampled, advantages, torch.random.get_rng_state()


EVERY = list(itertools.product(LOSS_TYPES, (0.0, 0.5), (1, 2)))
QUICK = [(loss_type, 0.5, 1) for loss_type in LOSS_TYPES] + [("dapo", 0.0, 2)]
COUNTED_BY_TOKEN = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")


@pytest.mark.parametrize(("loss_type", "beta", "passes"), mark_slow_cases(EVERY, QUICK))
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_mini_batches_in_micro_batches_are_those_of_trl(
    policy, tmp_path, monkeypatch, loss_type, beta, passes, padded
):
    changes = {"loss_type": loss_type, "beta": beta, "learning_rate": 0.3}
    with monkeypatch.context() as patch:
        # TRL's own order, padding and division: one micro-batch is one mini-batch.
        patch.setattr(fast_cpu, "can_pack", lambda _: False)
        patch.setattr(GDPOTrainer, "_is_divided", lambda _: False)
        expected, sampled, advantages, state = run_two_steps(
            policy, tmp_path, MINI, passes, **changes
        )
    if padded:
        monkeypatch.setattr(fast_cpu, "can_pack", lambda _: False)
    kept, again, _, state_again = run_two_steps(policy, tmp_path, 2, passes, **changes)
    assert again == sampled
    assert torch.equal(state, state_again), "no draw more or less"
    assert [len(each) for each in advantages] == [ROWS, ROWS], "over all completions of a step"
    assert len(kept.gradients) == len(expected.gradients) == 2 * passes * ROWS // MINI
    for ours, theirs in zip(kept.gradients, expected.gradients, strict=True):
        assert theirs.norm() > 1e-3
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    for ours, theirs in zip(kept.logs, expected.logs, strict=True):
        assert set(ours) == set(theirs)
        for name in COUNTED_BY_TOKEN:
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_the_clip_acts_from_the_second_mini_batch_on(policy, tmp_path):
    kept, *_ = run_two_steps(policy, tmp_path, 4, 1, learning_rate=3.0, epsilon=0.01, beta=0.0)
    first, second, *_ = [logs["clip_ratio/region_mean"] for logs in kept.logs]
    assert first == 0
    assert second > 0


# In a trial


def settings(**changes):
    return SETTINGS.replace(**changes)


def run(config, resume=None):
    reports = []
    outcome = train(config, resume=resume, report=lambda m, _: reports.append((m.step, m.metrics)))
    return [(step, metrics) for step, metrics in reports if metrics], outcome


def weights(outcome):
    return load_policy(str(outcome.checkpoint))[0].state_dict()


@pytest.mark.parametrize(
    ("mini", "micro", "expected"),
    [
        (0, 0, (16, 1, 1, 6)),
        (16, 4, (4, 4, 4, 6)),
        (8, 0, (8, 1, 2, 12)),
        (8, 4, (4, 2, 4, 12)),
        (4, 1, (1, 4, 16, 24)),
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
        (8, 16, "micro_batch_size 16 does not divide the 8 completions of a mini-batch"),
    ],
)
def test_a_size_that_does_not_divide_ends_the_trial(policy, tmp_path, toy, mini, micro, message):
    parts = settings(mini_batch_size=mini, micro_batch_size=micro)
    with pytest.raises(TrialFailure, match=message):
        run(build_trial_config(policy, tmp_path / "t", settings=parts))


def test_a_mini_batch_of_the_whole_step_changes_no_bit(policy, tmp_path, toy):
    expected, outcome = run(build_trial_config(policy, tmp_path / "none"))
    whole = build_trial_config(policy, tmp_path / "whole", settings=settings(mini_batch_size=16))
    again, same = run(whole)
    assert again == expected
    assert (same.validation, same.test) == (outcome.validation, outcome.test)


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
    # 6 steps of 4 prompts pass twice over 12 prompts, so a resume also crosses that boundary.
    parts = settings(
        steps=6, lr_schedule="cosine", warmup_share=0.3, mini_batch_size=8, micro_batch_size=4
    )
    parameters = {"num_iterations": passes, "beta": 0.01, "settings": parts}
    moves = (Segment(2, {"learning_rate": 3e-3, "reward_weights.length": 2.0}),)

    def configure(name):
        config = build_trial_config(policy, tmp_path / name, **parameters)
        return dataclasses.replace(config, schedule=moves)

    def stop_here(measurement, _):
        if measurement.step == stop:
            raise SystemExit

    whole, expected = run(configure("whole"))
    config = configure("cut")
    with pytest.raises(SystemExit):
        train(config, resume=None, report=stop_here)
    torch.rand(3)
    rest, outcome = run(config, resume=config.directory / f"checkpoint-{stop}")
    assert rest == whole[stop:]
    assert (outcome.validation, outcome.test) == (expected.validation, expected.test)
    theirs = weights(expected)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(outcome).items())


def test_values_that_move_do_so_at_a_step_and_not_at_an_optimizer_step(policy, tmp_path, toy):
    parts = settings(mini_batch_size=4)
    plain, _ = run(build_trial_config(policy, tmp_path / "plain", settings=parts))
    config = build_trial_config(policy, tmp_path / "moved", settings=parts)
    moved, _ = run(dataclasses.replace(config, schedule=(Segment(2, {"learning_rate": 1e-3}),)))
    assert moved[:2] == plain[:2]
    rates = [metrics["train/learning_rate"] for _, metrics in moved]
    assert rates == pytest.approx([0.01, 0.01, 1e-3])
