"""Facts about the normalization modes, by closed forms and against TRL's own code."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.training.normalization import compute_advantages
from tests.support import training as training_support
from tests.support.training import build_plain_trainer, write_policy

MODES = tuple(NORMALIZATIONS)
SUM_MODES = ("grpo", "grpo_no_std", "grpo_batch")
TINY = 1e-12
"""An eps that does not blur the comparison with closed forms."""


def draw(prompts: int, group: int, rewards: int, seed: int = 0) -> torch.Tensor:
    """Binary rewards in float64, some groups dead in some rewards."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (prompts * group, rewards), generator=generator).double()


def advantages(rewards, weights, group, mode, eps=1e-4):
    return compute_advantages(rewards, torch.tensor(weights), group, mode, eps)


# The toy table


def distinct(groups: torch.Tensor, mode: str, eps: float = TINY, decimals: int = 6) -> int:
    """Distinct sorted tuples of advantages over groups [P, G, K]; one call, if P may share it."""
    prompts, group, rewards = groups.shape
    flat = groups.reshape(-1, rewards).double()
    weights = [1.0] * rewards
    if mode == "gdpo":  # whitening spans the batch, so each group has to be one of its own
        rows = [advantages(g.double(), weights, group, mode, eps) for g in groups]
        result = torch.stack(rows)
    else:
        result = advantages(flat, weights, group, mode, eps).view(prompts, group)
    rounded = (result.sort(dim=1).values * 10**decimals).round()
    return len(torch.unique(rounded, dim=0))


def unordered(patterns: list[tuple[int, ...]], group: int) -> torch.Tensor:
    """Every multiset of `group` rollouts, [P, G, K]."""
    return torch.tensor(list(itertools.combinations_with_replacement(patterns, group)))


def binary(rewards: int) -> list[tuple[int, ...]]:
    return list(itertools.product((0, 1), repeat=rewards))


def columns(group: int, rewards: int) -> torch.Tensor:
    """Every group up to the order of its rewards, which equal weights ignore: far fewer."""
    chosen = itertools.combinations_with_replacement(binary(group), rewards)
    return torch.tensor(list(chosen)).transpose(1, 2)


@pytest.mark.parametrize(
    ("mode", "counts"),
    [
        ("grpo", [2, 4, 7, 11, 16, 22, 29, 37, 46, 56, 67]),
        ("grpo_no_std", [3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 78]),
        ("gdpo_no_batch_norm", [3, 6, 14, 26, 38, 59, 81, 109, 145, 186, 230]),
    ],
)
def test_toy_table_two_rewards(mode, counts):
    assert [distinct(unordered(binary(2), g), mode) for g in range(2, 13)] == counts


@pytest.mark.parametrize(
    ("mode", "counts"),
    [("grpo", [7, 14, 23, 41, 56, 89, 119]), ("grpo_no_std", [10, 20, 35, 56, 84, 120, 165])],
)
def test_toy_table_four_rollouts_of_summed_rewards(mode, counts):
    # One pattern a sum is enough, since these modes see nothing but the sum.
    patterns = [[tuple(int(i < s) for i in range(k)) for s in range(k + 1)] for k in range(2, 9)]
    assert [distinct(unordered(p, 4), mode) for p in patterns] == counts
    assert [distinct(columns(4, k), mode) for k in range(2, 5)] == counts[:3]


def test_toy_table_four_rollouts_of_gdpo():
    counts = [distinct(columns(4, k), "gdpo_no_batch_norm") for k in range(2, 7)]
    assert counts == [14, 45, 127, 318, 722]


def test_toy_table_needs_rounding_where_eps_is_not_small():
    groups = unordered(binary(2), 4)
    assert distinct(groups, "grpo", eps=1e-4, decimals=3) == 7
    unrounded = distinct(groups, "grpo", eps=1e-4, decimals=9)
    assert unrounded == distinct(groups, "grpo_no_std", eps=1e-4, decimals=9) == 10


def test_one_prompt_per_batch_collapses_gdpo_again():
    for group, apart, together in ((4, 14, 9), (8, 81, 63)):
        groups = unordered(binary(2), group)
        assert distinct(groups, "gdpo_no_batch_norm") == apart
        assert distinct(groups, "gdpo") == together


# Scales and weights


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [100.0, 0.01, 1e-6])
def test_overall_scale_of_the_weights_cancels(mode, scale):
    rewards = draw(8, 4, 3)
    weights = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
    expected = compute_advantages(rewards, weights, 4, mode)
    torch.testing.assert_close(
        compute_advantages(rewards, scale * weights, 4, mode), expected, rtol=1e-12, atol=1e-12
    )


def test_gdpo_ignores_an_affine_change_of_one_reward_and_grpo_does_not():
    rewards = draw(8, 8, 2)
    changed = rewards.clone()
    changed[:, 1] = 7 * changed[:, 1] - 3
    weights = [1.0, 0.5]
    moved = {
        mode: (advantages(changed, weights, 8, mode) - advantages(rewards, weights, 8, mode))
        .abs()
        .max()
        for mode in ("gdpo", "grpo")
    }
    assert moved["gdpo"] <= 3e-4
    assert moved["grpo"] > 0.1


@pytest.mark.parametrize("mode", SUM_MODES)
def test_sum_modes_identify_only_weight_times_scale(mode):
    rewards = draw(8, 4, 2)
    scaled = rewards * torch.tensor([1.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(
        advantages(scaled, [1.0, 0.125], 4, mode), advantages(rewards, [1.0, 0.5], 4, mode)
    )


@pytest.mark.parametrize(("mode", "factor"), [("grpo", 1), ("grpo_batch", 1), ("grpo_no_std", 10)])
def test_overall_scale_of_the_rewards(mode, factor):
    rewards = draw(8, 4, 2)
    torch.testing.assert_close(
        advantages(10 * rewards, [1.0, 0.5], 4, mode, TINY),
        factor * advantages(rewards, [1.0, 0.5], 4, mode, TINY),
    )


@pytest.mark.parametrize("mode", MODES)
def test_weight_zero_equals_dropping_the_reward(mode):
    rewards = draw(8, 4, 3)
    rewards[5, 0] = rewards[5, 2] = math.nan  # then only the reward without weight is scored
    kept = rewards[:, [0, 2]]
    assert torch.equal(
        advantages(rewards, [1.0, 0.0, 0.5], 4, mode), advantages(kept, [1.0, 0.5], 4, mode)
    )


# Closed forms


def test_groups_of_two_reduce_each_reward_to_its_sign():
    rewards = torch.tensor([[0.1], [0.9], [5.0], [-2.0], [3.0], [3.0]], dtype=torch.float64)
    half = math.sqrt(0.5)
    expected = torch.tensor([-half, half, half, -half, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards, [1.0], 2, "gdpo_no_batch_norm", TINY), expected)


@pytest.mark.parametrize("group", [2, 4, 8])
def test_single_reward_gdpo_is_grpo_at_another_scale(group):
    rewards = draw(12, group, 1)
    rewards[:group] = 1
    grouped = rewards.view(12, group)
    dead = float((grouped == grouped[:, :1]).all(dim=1).double().mean())
    count = len(rewards)
    scale = 1 / math.sqrt((1 - dead) * (group - 1) / group * count / (count - 1))
    gdpo = advantages(rewards, [1.0], group, "gdpo", TINY)
    grpo = advantages(rewards, [1.0], group, "grpo", TINY)
    assert abs(scale - 1) > 0.01, "the modes must differ, or this could not tell a silent fallback"
    torch.testing.assert_close(gdpo, scale * grpo)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("grpo_no_std", [-1.5, 1.5, -0.5, 0.5]),
        ("grpo", [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5]),
        ("grpo_batch", [-1.161895, 1.161895, -0.387298, 0.387298]),
        ("gdpo_no_std", [-1.161895, 1.161895, -0.387298, 0.387298]),
        ("gdpo_no_batch_norm", [-(2**0.5), 2**0.5, -(0.5**0.5), 0.5**0.5]),
        ("gdpo", [-1.095445, 1.095445, -0.547723, 0.547723]),
    ],
)
def test_each_mode_by_hand(mode, expected):
    # Group 1: rewards (0, 0) and (1, 2); group 2: (1, 0) and (1, 1). Sums 0, 3 and 1, 2.
    rewards = torch.tensor([[0, 0], [1, 2], [1, 0], [1, 1]], dtype=torch.float64)
    result = advantages(rewards, [1.0, 1.0], 2, mode, TINY)
    torch.testing.assert_close(
        result, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("mode", [m for m in MODES if m != "grpo"])
def test_modes_differ(mode):
    rewards = draw(8, 4, 3)
    assert not torch.allclose(
        advantages(rewards, [1.0, 0.5, 0.25], 4, mode),
        advantages(rewards, [1.0, 0.5, 0.25], 4, "grpo"),
        atol=1e-3,
    )


# Dead groups and rounding error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_groups_get_exactly_zero(mode, dtype):
    generator = torch.Generator().manual_seed(1)
    rewards = (6 * torch.rand(9, 1, 2, generator=generator, dtype=dtype) - 3).expand(9, 7, 2)
    rewards = rewards.reshape(63, 2) * 200
    assert torch.equal(advantages(rewards, [1.0, 0.3], 7, mode), torch.zeros(63, dtype=dtype))
    mixed = rewards.clone()
    mixed[56:] = torch.rand(7, 1, generator=generator, dtype=dtype)  # both agree: gd2po keeps all
    result = advantages(mixed, [1.0, 0.3], 7, mode)
    assert torch.equal(result[:56], torch.zeros(56, dtype=dtype))
    assert (result[56:] != 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_rewards_that_cancel_leave_no_rounding_error(mode):
    rewards = torch.tensor([[0.1, 0.3], [0.3, 0.1]] * 4, dtype=torch.float64)
    assert torch.equal(
        advantages(rewards, [1.0, 1.0], 2, mode, TINY), torch.zeros(8, dtype=torch.float64)
    )


# Missing rewards


@pytest.mark.parametrize("mode", MODES)
def test_a_completion_without_any_reward_gets_zero_and_enters_no_statistic(mode):
    rewards = draw(6, 4, 2, seed=3)
    rewards[7] = math.nan
    result = advantages(rewards, [1.0, 0.5], 4, mode)
    assert result[7] == 0
    assert result.isfinite().all()
    # Its group is one of three: those three alone must come out as in a batch of groups of three.
    three = rewards[4:7]
    if mode in ("grpo", "grpo_no_std", "gdpo_no_batch_norm"):
        torch.testing.assert_close(result[4:7], advantages(three, [1.0, 0.5], 3, mode))


@pytest.mark.parametrize("mode", [*SUM_MODES, "gdpo_no_std"])
def test_a_missing_reward_counts_as_its_groups_mean(mode):
    rewards = draw(6, 4, 3, seed=4)
    missing = rewards.clone()
    missing[5, 1] = math.nan
    filled = rewards.clone()
    filled[5, 1] = rewards[[4, 6, 7], 1].mean()
    weights = [1.0, 0.5, 0.25]
    torch.testing.assert_close(
        advantages(missing, weights, 4, mode), advantages(filled, weights, 4, mode)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_without_any_score_equals_a_dropped_one(mode):
    rewards = draw(6, 4, 3, seed=5)
    rewards[:, 1] = math.nan
    torch.testing.assert_close(
        advantages(rewards, [1.0, 0.5, 0.25], 4, mode),
        advantages(rewards[:, [0, 2]], [1.0, 0.25], 4, mode),
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_any_score_gets_zeros(mode):
    assert torch.equal(
        advantages(torch.full((8, 2), math.nan), [1.0, 1.0], 4, mode), torch.zeros(8)
    )


@pytest.mark.parametrize("mode", MODES)
def test_empty_batch(mode):
    assert advantages(torch.zeros(0, 2), [1.0, 1.0], 4, mode).shape == (0,)


VALUE = st.one_of(st.just(math.nan), st.floats(-200, 200, width=32), st.sampled_from([0.0, 1.0]))


@settings(deadline=None, database=None, derandomize=True)  # a loaded machine is no failure
@given(
    st.integers(2, 5).flatmap(
        lambda group: st.tuples(
            st.just(group),
            st.lists(st.lists(VALUE, min_size=2, max_size=2), min_size=group, max_size=4 * group),
        )
    ),
    st.sampled_from(MODES),
)
def test_any_rewards_give_finite_advantages_that_follow_their_groups(case, mode):
    group, rows = case
    rewards = torch.tensor(rows[: len(rows) // group * group], dtype=torch.float32)
    result = advantages(rewards, [1.0, 0.3], group, mode)
    assert result.isfinite().all()
    assert result.dtype == torch.float32
    grouped = rewards.unflatten(0, (-1, group))
    moved = grouped.flip(0).roll(1, dims=1).flatten(0, 1)
    expected = result.view(-1, group).flip(0).roll(1, dims=1).flatten()
    torch.testing.assert_close(
        advantages(moved, [1.0, 0.3], group, mode), expected, rtol=1e-3, atol=1e-4
    )


# What is refused


def test_infinite_reward_is_refused():
    rewards = torch.zeros(4, 2)
    rewards[3, 1] = -math.inf
    with pytest.raises(NonFiniteError, match="reward 1 of completion 3"):
        advantages(rewards, [1.0, 1.0], 2, "gdpo")


@pytest.mark.parametrize(
    ("weights", "group", "eps", "message"),
    [
        ([0.0, 0.0], 2, 1e-4, "not all 0"),
        ([1.0, -1.0], 2, 1e-4, "not negative"),
        ([1.0, math.nan], 2, 1e-4, "finite"),
        ([1.0], 2, 1e-4, "not \\[N, K\\]"),
        ([1.0, 1.0], 3, 1e-4, "whole groups of 3"),
        ([1.0, 1.0], 0, 1e-4, "whole groups of 0"),
        ([1.0, 1.0], 2, 0.0, "eps"),
    ],
)
def test_invalid_arguments_are_refused(weights, group, eps, message):
    with pytest.raises(ValueError, match=message):
        advantages(torch.zeros(4, 2), weights, group, "gdpo", eps)


def test_unknown_mode():
    with pytest.raises(KeyError, match="ppo"):
        advantages(torch.zeros(4, 2), [1.0, 1.0], 2, "ppo")


# Against TRL's own code

BRANCHES = {
    "gdpo": ("normalize_then_sum", "group"),
    "grpo": ("sum_then_normalize", "group"),
    "grpo_no_std": ("sum_then_normalize", "none"),
    "grpo_batch": ("sum_then_normalize", "batch"),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return build_plain_trainer(write_policy(folder / "policy"), folder / "out")


def trl_advantages(trainer, rewards, weights, group, mode, scale_rewards=None):
    aggregation, scale = BRANCHES[mode]
    scale = scale_rewards or scale
    return training_support.compute_trl_advantages(
        trainer, rewards, weights, group, aggregation, scale
    )


@pytest.mark.parametrize("mode", BRANCHES)
@pytest.mark.parametrize("group", [2, 4, 7])
def test_equal_to_trl_where_trl_is_right(trainer, mode, group):
    generator = torch.Generator().manual_seed(group)
    rewards = draw(8, group, 3, seed=group)
    rewards[:, 2] = 6 * torch.rand(8 * group, generator=generator, dtype=torch.float64) - 3
    weights = [0.5, 1.0, 0.125]
    theirs = trl_advantages(trainer, rewards, weights, group, mode)
    assert theirs.dtype == torch.float64
    torch.testing.assert_close(advantages(rewards, weights, group, mode), theirs, rtol=0, atol=1e-6)


def test_equal_to_trl_with_missing_rewards_under_gdpo(trainer):
    rewards = draw(8, 4, 3, seed=8)
    rewards[3, 1] = rewards[17, 0] = math.nan
    rewards[9] = math.nan
    weights = [1.0, 0.5, 0.25]
    theirs = trl_advantages(trainer, rewards, weights, 4, "gdpo")
    torch.testing.assert_close(advantages(rewards, weights, 4, "gdpo"), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", SUM_MODES)
def test_completions_without_any_reward_equal_trl_in_the_sum_modes(trainer, mode):
    rewards = draw(8, 4, 2, seed=9)
    rewards[9] = math.nan
    theirs = trl_advantages(trainer, rewards, [1.0, 0.5], 4, mode)
    torch.testing.assert_close(advantages(rewards, [1.0, 0.5], 4, mode), theirs, rtol=0, atol=1e-6)


def test_trl_takes_a_missing_reward_for_zero_in_the_sum_modes(trainer):
    rewards = torch.ones(8, 2, dtype=torch.float64)
    rewards[0, 1] = math.nan
    assert trl_advantages(trainer, rewards, [1.0, 1.0], 4, "grpo_no_std")[0] == -0.75
    assert torch.equal(
        advantages(rewards, [1.0, 1.0], 4, "grpo_no_std"), torch.zeros(8, dtype=torch.float64)
    )


def test_trl_is_wrong_in_dead_groups_and_we_are_exactly_zero(trainer):
    generator = torch.Generator().manual_seed(0)
    rewards = (6 * torch.rand(8, 1, 2, generator=generator) - 3).expand(8, 7, 2).reshape(56, 2)
    theirs = trl_advantages(trainer, rewards, [1.0, 1.0], 7, "gdpo")
    assert theirs.abs().max() > 0.1
    assert torch.equal(advantages(rewards, [1.0, 1.0], 7, "gdpo"), torch.zeros(56))
    theirs = trl_advantages(trainer, 199 + rewards, [1.0, 1.0], 7, "grpo")
    assert theirs.abs().max() > 0.01
    assert torch.equal(advantages(199 + rewards, [1.0, 1.0], 7, "grpo"), torch.zeros(56))


def test_trl_gdpo_ignores_scale_rewards(trainer):
    rewards = draw(8, 4, 2)
    results = [
        trl_advantages(trainer, rewards, [1.0, 0.5], 4, "gdpo", scale_rewards=scale)
        for scale in ("group", "none", "batch")
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
