"""GDPOTrainer: advantages, metrics of each reward, the guard on NaN."""

import math

import pytest
import torch

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.training.normalization import compute_advantages
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer, compute_reward_metrics
from tests.support.gradients import short, vowels
from tests.support.training import build_plain_trainer

NAN = math.nan
pytestmark = pytest.mark.filterwarnings(
    # A reward that scored nothing makes TRL's own statistics of it empty.
    "ignore:.*[Dd]egrees of freedom:UserWarning"
)


@pytest.fixture
def build(policy, tmp_path):
    """Build a trainer of two rewards."""

    def build(**changes):
        settings = {"normalization": "gdpo", "reward_funcs": [vowels, short], **changes}
        own = {"cls": GDPOTrainer, "rollout_func": sample_for_trainer}
        return build_plain_trainer(policy, tmp_path, **own, **settings)

    return build


def generate_batch(trainer, prompts: int = 4):
    """Generate one batch; return it and its rewards."""
    trainer.model.train()
    kept = {}
    inner = trainer._calculate_rewards

    def keep(*arguments):
        kept["rewards"] = inner(*arguments)
        return kept["rewards"]

    trainer._calculate_rewards = keep
    group = trainer.num_generations
    rows = [{"prompt": letter + "="} for letter in "abcd"[:prompts] for _ in range(group)]
    return trainer._generate_and_score_completions(rows), kept["rewards"]


@pytest.mark.parametrize("mode", NORMALIZATIONS)
def test_advantages_are_those_of_the_mode(build, mode):
    trainer = build(normalization=mode, reward_weights=[1.0, 0.25])
    output, rewards = generate_batch(trainer)
    expected = compute_advantages(rewards, torch.tensor([1.0, 0.25]), 4, mode)
    assert torch.equal(output["advantages"], expected)
    assert list(trainer._logs["advantages"]) == expected.tolist()
    assert expected.abs().sum() > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps_per_generation": 2, "per_device_train_batch_size": 8},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
        {"num_iterations": 2},
    ],
    ids=["plain", "steps-per-generation", "accumulation", "passes"],
)
def test_a_missing_reward_and_any_batching_keep_training_finite(build, changes):
    def sometimes(completions, **_):
        return [None if i % 3 else float(len(text)) for i, text in enumerate(completions)]

    trainer = build(reward_funcs=[sometimes, vowels], **changes)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_reward_of_nan_or_inf_ends_training(build, value):
    def broken(completions, **_):
        return [0.0] * (len(completions) - 1) + [value]

    message = f"reward broken of completion 15 is {value} at step 1"
    with pytest.raises(NonFiniteError, match=message):
        build(reward_funcs=[vowels, broken]).train()


def test_a_loss_of_nan_ends_training_and_names_the_step(build):
    trainer = build()
    trainer.model.model.norm.weight.data[0] = NAN
    with pytest.raises(NonFiniteError, match="loss is nan at step 1"):
        trainer.train()


def test_a_policy_that_diverges_ends_training(build):
    with pytest.raises(NonFiniteError, match=r"is (nan|inf) at step [2-5]"):
        build(learning_rate=1e30, max_steps=5).train()


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_gradient_norm_of_nan_or_inf_ends_training_and_names_the_step(build, value):
    trainer = build()
    first = next(trainer.model.parameters())
    first.register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(NonFiniteError, match=r"gradient norm is .* at step 1"):
        trainer.train()


def test_steps_before_the_first_advantage_move_what_a_whole_pass_would(build):
    """Source: arithmetic: the gradient of an advantage of 0 is 0, however it is computed."""

    def late(completions, trainer_state, **_):
        return [float(i % 4) * (trainer_state.global_step >= 2) for i in range(len(completions))]

    def train(had_signal, **changes):
        torch.manual_seed(0)
        trainer = build(reward_funcs=[late], max_steps=4, learning_rate=1e-3, **changes)
        trainer._had_signal = had_signal
        passes, inner = [], trainer._get_per_token_logps_and_entropies

        def count(model, *arguments, **keywords):
            if model is not trainer.ref_model:
                passes.append(trainer.state.global_step)
            return inner(model, *arguments, **keywords)

        trainer._get_per_token_logps_and_entropies = count
        trainer.train()
        return trainer.model, passes

    (short_cut, passes), (whole, all_passes) = train(False), train(True)
    assert passes == [2, 3]
    assert all_passes == [0, 1, 2, 3]
    for own, other in zip(short_cut.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, other)
    assert train(False, beta=0.1)[1] == all_passes, "moved by a term of its own"


def measure(rewards, weights, group=2):
    names = "abcd"[: len(weights)]
    return compute_reward_metrics(torch.tensor(rewards), torch.tensor(weights), group, [*names])


def test_metrics_of_each_reward():
    rewards = [[1, 5, NAN, 2], [1, 5, NAN, NAN], [0, 5, NAN, NAN], [2, 5, NAN, 4]]
    metrics = measure(rewards, [1.0, 9.0, 1.0, 0.5])
    assert metrics["rewards/a/mean"] == 1
    assert metrics["rewards/a/std"] == pytest.approx(math.sqrt(2 / 3))
    assert metrics["rewards/a/frac_reward_zero_std"] == 0.5
    assert metrics["rewards/b/frac_reward_zero_std"] == 1
    assert metrics["rewards/d/mean"] == 3
    # b never varies within a group, d has one value a group: all of the pull is a's.
    shares = [metrics[f"rewards/{name}/share"] for name in "abcd"]
    assert shares == [1, 0, 0, 0]
    assert "rewards/c/mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("rewards", "weights", "shares"),
    [
        ([[0.0, 0], [1, 4], [10, 0], [11, 4]], [1.0, 0.5], [1 / 3, 2 / 3]),
        ([[1.0, 1]] * 4, [1.0, 1.0], [0, 0]),  # without any spread
    ],
)
def test_shares_are_weight_times_spread_within_groups(rewards, weights, shares):
    metrics = measure(rewards, weights)
    assert [metrics[f"rewards/{name}/share"] for name in "ab"] == pytest.approx(shares)


@pytest.mark.parametrize("group", [8, 16])
def test_a_group_of_equal_sums_is_dead_whatever_float32_rounds(build, group):
    """Source: NeMo-RL#4161: a unanimous group teaches nothing, so its share counts as 1."""

    def fifth(completions, **_):
        return [0.2] * len(completions)

    def tenth(completions, **_):
        return [0.1] * len(completions)

    trainer = build(reward_funcs=[fifth, tenth], num_generations=group)
    output, _ = generate_batch(trainer, prompts=16 // group)
    assert not output["advantages"].any()
    expected = {
        "frac_reward_zero_std": [1.0],
        "reward_std": [0.0],
        "frac_advantage_zero": [1.0],
        "rewards/tenth/frac_reward_zero_std": [1.0],
    }
    assert trainer._metrics["train"].items() >= expected.items()


@pytest.mark.parametrize("value", [0.1, 0.3, 1e-9, 1e9 + 0.1])
def test_equal_rewards_are_dead_at_any_value(value):
    """Source: arithmetic: the float mean of three times 0.1 is not 0.1."""
    metrics = measure([[value]] * 6, [1.0], 3)
    assert metrics["rewards/a/frac_reward_zero_std"] == metrics["frac_reward_zero_std"] == 1
    assert metrics["rewards/a/share"] == metrics["reward_std"] == 0


def test_a_group_is_dead_if_its_weighted_sum_is_equal():
    """Source: arithmetic, and `normalization`: a missing reward is its group's mean."""
    alive, dead = [[0.1, 0.2], [0.2, 0.2]], [[0.1, 0.2], [0.2, 0.1]]
    missing = [[0.3, NAN], [0.3, 0.1], [NAN, NAN], [NAN, NAN]]
    metrics = measure([*dead, *alive, *missing], [1.0, 1.0])
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert "reward_std" not in metrics  # TRL's stays
    weighted = measure([*dead, *alive, *missing], [1.0, 0.0])
    assert weighted["frac_reward_zero_std"] == pytest.approx(1 / 3)
