"""Reward weights and learning rate that change while a trial trains."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

from gdpo_tune.core.trial_config import Segment, TrialConfig
from gdpo_tune.training import worker_cache
from gdpo_tune.training.checkpoints import adopt_checkpoint, find_newest_checkpoint
from tests.support.training import (
    SETTINGS,
    build_trial_config,
    have_same_weights,
    mark_slow_cases,
    run,
    stop_after,
)

pytestmark = pytest.mark.usefixtures("toy")

STEPS = 5
SHAPED = SETTINGS.replace(steps=STEPS, lr_schedule="linear", warmup_share=0.4, evaluate_every=5)
OTHER = {"learning_rate": 3e-3, "reward_weights.hits": 0.2, "reward_weights.length": 2.0}


def add_schedule(config: TrialConfig, *segments: Segment) -> TrialConfig:
    return dataclasses.replace(config, schedule=segments)


def list_metrics(reports):
    """Return the metrics of each step."""
    return {m.step: dict(m.metrics) for m, _ in reports if m.metrics}


def assert_same(one, other):
    (reports, outcome), (expected, reference) = one, other
    measured, whole = list_metrics(reports), list_metrics(expected)
    assert measured == {step: whole[step] for step in measured}
    assert (outcome.validation, outcome.test) == (reference.validation, reference.test)
    assert have_same_weights(outcome.checkpoint, reference.checkpoint)


def test_a_schedule_from_the_start_equals_a_trial_without_one(policy, tmp_path):
    expected = run(build_trial_config(policy, tmp_path / "plain", settings=SHAPED, **OTHER))
    replaced = build_trial_config(policy, tmp_path / "replaced", settings=SHAPED)
    assert_same(run(add_schedule(replaced, Segment(0, OTHER))), expected)


def test_new_values_hold_from_their_step_on(policy, tmp_path):
    plain = build_trial_config(policy, tmp_path / "before", settings=SHAPED)
    before = list_metrics(run(plain)[0])
    other = dataclasses.replace(plain, directory=tmp_path / "changed")
    changed = list_metrics(run(add_schedule(other, Segment(2, OTHER)))[0])
    assert changed[1] == before[1]
    assert changed[2] == before[2]
    share = "train/rewards/length/share"
    assert changed[3][share] != before[3][share]  # the same samples, weighed otherwise
    assert changed[3]["train/rewards/length/mean"] == before[3]["train/rewards/length/mean"]
    rates = [changed[step]["train/learning_rate"] for step in (3, 4, 5)]
    full = [before[step]["train/learning_rate"] for step in (3, 4, 5)]
    assert rates == pytest.approx([0.3 * rate for rate in full])
    assert full[0] > full[1] > full[2]


@pytest.mark.parametrize(
    ("stop", "passes"), mark_slow_cases(product((1, 2, 3), (1, 2)), [(2, 2), (3, 1)])
)
def test_a_trial_with_a_schedule_resumes_bitwise_equal(policy, tmp_path, stop, passes):
    segments = (Segment(2, OTHER), Segment(4, {"learning_rate": 1e-2}))
    parameters = {"settings": SHAPED, "num_iterations": passes}
    expected = run(
        add_schedule(build_trial_config(policy, tmp_path / "whole", **parameters), *segments)
    )
    config = add_schedule(build_trial_config(policy, tmp_path / "cut", **parameters), *segments)
    newest = stop_after(config, stop)
    worker_cache.release_worker_cache()
    torch.rand(3)
    assert_same(run(config, newest), expected)


def test_an_adopted_checkpoint_continues_bitwise_as_one_training(policy, tmp_path):
    donor = build_trial_config(policy, tmp_path / "donor", settings=SHAPED)
    config = add_schedule(
        build_trial_config(policy, tmp_path / "member", settings=SHAPED), Segment(2, OTHER)
    )
    stop_after(build_trial_config(policy, tmp_path / "member", settings=SHAPED, seed=1), 3)
    adopt_checkpoint(stop_after(donor, 2), config.directory)
    adopted = find_newest_checkpoint(config.directory)
    assert adopted is not None
    assert adopted.name == "checkpoint-2"  # the member's own checkpoints are deleted
    one = dataclasses.replace(config, directory=tmp_path / "one")
    assert_same(run(config, adopted), run(one))
    assert (donor.directory / "checkpoint-2").is_dir()


def test_the_order_in_which_segments_are_written_does_not_matter(policy, tmp_path):
    config = build_trial_config(policy, tmp_path)
    late, early = Segment(4, {"learning_rate": 2.0}), Segment(2, OTHER)
    config_with_schedule = add_schedule(config, late, early)
    assert config_with_schedule.get_params_at(1) == config.params
    assert config_with_schedule.get_params_at(3) == {**config.params, **OTHER}
    assert config_with_schedule.get_params_at(4) == {**config.params, **OTHER, "learning_rate": 2.0}
    assert config_with_schedule.get_reward_weights(2)["hits"] == 0.2


@pytest.mark.parametrize(
    ("step", "params"), [(1, {"group_size": 8}), (1, {"beta": 0.1}), (-1, {"learning_rate": 1e-3})]
)
def test_parameters_that_cannot_move_are_refused(step, params):
    with pytest.raises(ValueError, match=f"at step {step}"):
        Segment(step, params)
