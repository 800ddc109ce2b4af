"""Modes with weights of their own, the saturation exponent, and the leave-one-out baseline."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.training.normalization import compute_advantages

TINY = 1e-12
CALM = settings(deadline=None, database=None, derandomize=True)
USES_GAMMA, USES_BASELINE = (
    [mode for mode, info in NORMALIZATIONS.items() if name not in info.ignores]
    for name in ("gamma", "baseline")
)
UNIT = [(0.0, 1.0)] * 2


def advantages(rewards, weights, group, mode, eps=TINY, **more):
    weights = torch.tensor(weights, dtype=torch.float64)
    return compute_advantages(rewards.double(), weights, group, mode, eps, **more)


def draw(prompts: int, group: int, rewards: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(prompts * group, rewards, generator=generator, dtype=torch.float64)


batches = st.integers(2, 5).flatmap(
    lambda group: st.tuples(
        st.just(group),
        st.lists(
            st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 2),
            min_size=2 * group,
            max_size=4 * group,
        ).map(lambda rows: rows[: len(rows) // group * group]),
    )
)


# DVAO


@CALM
@given(batches, st.floats(0.05, 2))
def test_dvao_is_the_spread_weighted_average_of_gdpos_terms(case, weight):
    group, rows = case
    rewards = torch.tensor(rows).double()
    result = advantages(rewards, [1.0, weight], group, "dvao").view(-1, group)
    for block, values in zip(rewards.view(-1, group, 2), result, strict=True):
        std = block.std(dim=0)
        terms = (block - block.mean(dim=0)) / std.clamp(min=1e-9)
        spread = std * torch.tensor([1.0, weight], dtype=torch.float64)
        if spread.sum() == 0:
            assert torch.equal(values, torch.zeros(group, dtype=torch.float64))
            continue
        torch.testing.assert_close(values, (terms * spread).sum(dim=1) / spread.sum())
        bound = terms[:, std > 0].abs().max(dim=1).values
        assert (values.abs() <= bound + 1e-9).all(), "an average is within its terms"


@CALM
@given(batches, st.floats(0.05, 2))
def test_dvao_has_grpos_direction_in_every_group(case, weight):
    group, rows = case
    rewards = torch.tensor(rows).double()
    dvao = advantages(rewards, [1.0, weight], group, "dvao").view(-1, group)
    grpo = advantages(rewards, [1.0, weight], group, "grpo_no_std").view(-1, group)
    for ours, theirs in zip(dvao, grpo, strict=True):
        product = (ours * theirs).sum()
        torch.testing.assert_close(product, ours.norm() * theirs.norm(), atol=1e-9, rtol=1e-9)


def test_dvao_of_one_reward_is_grpo():
    rewards = draw(6, 4, 1)
    torch.testing.assert_close(
        advantages(rewards, [1.0], 4, "dvao"), advantages(rewards, [1.0], 4, "grpo")
    )


def test_dvao_weighs_by_spread_and_gdpo_does_not():
    rewards = torch.tensor([[0.0, 0.1], [1.0, 0.0]], dtype=torch.float64)
    # The wide reward wins: (1 - .1) / (1 + .1) of what it would get alone.
    expected = torch.tensor([-1.0, 1.0], dtype=torch.float64) * math.sqrt(0.5) * 0.9 / 1.1
    torch.testing.assert_close(advantages(rewards, [1.0, 1.0], 2, "dvao"), expected)
    plain = advantages(rewards, [1.0, 1.0], 2, "gdpo_no_batch_norm")
    torch.testing.assert_close(plain, torch.zeros_like(plain))


# SAW


@CALM
@given(batches, st.floats(0.05, 2))
def test_saw_is_gdpo_with_weights_times_the_coefficient_of_variation(case, weight):
    group, rows = case
    rewards = torch.tensor(rows).double() + 0.5
    ratio = rewards.std(dim=0) / rewards.mean(dim=0)
    weights = ratio * torch.tensor([1.0, weight], dtype=torch.float64)
    if weights.max() < 1e-9:
        return
    result = advantages(rewards, [1.0, weight], group, "saw", eps=1e-9)
    expected = advantages(rewards, weights.tolist(), group, "gdpo", eps=1e-9)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_saw_counts_the_mean_from_the_lowest_value_of_the_range():
    """In [-3, 3], as in the authors' code: shifted by 3, the reward is one in [0, 6]."""
    rewards = draw(8, 4, 2)
    wide = rewards.clone()
    wide[:, 0] = 6 * rewards[:, 0] - 3
    result = advantages(wide, [1.0, 1.0], 4, "saw", ranges=[(-3.0, 3.0), (0.0, 1.0)])
    torch.testing.assert_close(result, advantages(rewards, [1.0, 1.0], 4, "saw", ranges=UNIT))
    ratio = rewards.std(dim=0) / rewards.mean(dim=0)
    torch.testing.assert_close(result, advantages(rewards, ratio.tolist(), 4, "gdpo"))


def test_saw_does_not_depend_on_a_rewards_scale():
    rewards = draw(8, 4, 2)
    torch.testing.assert_close(
        advantages(rewards * torch.tensor([7.0, 1.0]), [1.0, 1.0], 4, "saw"),
        advantages(rewards, [1.0, 1.0], 4, "saw"),
    )


def test_saw_of_a_mean_of_zero_is_finite_and_leaves_that_reward_alone():
    rewards = draw(8, 4, 2)
    rewards[:, 0] -= rewards[:, 0].mean()
    result = advantages(rewards, [1.0, 1.0], 4, "saw", eps=1e-8, ranges=[UNKNOWN_RANGE] * 2)
    assert result.isfinite().all()
    alone = advantages(rewards[:, :1], [1.0], 4, "gdpo", eps=1e-8)
    torch.testing.assert_close(result, alone, atol=1e-5, rtol=1e-5)


def test_saw_drops_a_reward_that_is_constant():
    rewards = draw(8, 4, 2)
    rewards[:, 1] = 0.7
    torch.testing.assert_close(
        advantages(rewards, [0.3, 1.0], 4, "saw"), advantages(rewards[:, :1], [1.0], 4, "gdpo")
    )


# GD2PO


def test_gd2po_drops_who_disagrees_and_weighs_a_group_by_the_share_it_keeps():
    # Group 1 keeps its first and last completion: sums of +-2a, halved. Group 2 keeps all: +-a.
    first = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    second = torch.tensor([[0, 3], [0, 3], [1, 3], [1, 3]])
    value = math.sqrt(5 / 6)  # six values of +-a, whitened
    expected = torch.tensor([-1, 0, 0, 1, -1, -1, 1, 1], dtype=torch.float64) * value
    result = advantages(torch.cat([first, second]), [1.0, 1.0], 4, "gd2po")
    torch.testing.assert_close(result, expected)


@CALM
@given(batches, st.floats(0.05, 2))
def test_gd2po_is_its_definition_completion_by_completion(case, weight):
    group, rows = case
    rewards = torch.tensor(rows).double()
    kept: dict[int, float] = {}
    for start in range(0, len(rows), group):
        block = rewards[start : start + group]
        terms = (block - block.mean(dim=0)) / block.std(dim=0).clamp(min=1e-9)
        agreeing = [i for i, (a, b) in enumerate(terms.tolist()) if a * b > -1e-12]
        for i in agreeing:
            total = float(terms[i, 0] + weight * terms[i, 1])
            kept[start + i] = total * len(agreeing) / group
    values = torch.tensor(list(kept.values()), dtype=torch.float64)
    expected = torch.zeros(len(rows), dtype=torch.float64)
    if len(kept) > 1 and values.std() > 1e-9:
        expected[list(kept)] = (values - values.mean()) / values.std()
    alive = (rewards.view(-1, group, 2).std(dim=1) > 0).any(dim=1).repeat_interleave(group)
    result = advantages(rewards, [1.0, weight], group, "gd2po")
    torch.testing.assert_close(result, expected * alive, atol=1e-6, rtol=1e-6)


def test_gd2po_of_rewards_that_agree_is_gdpo():
    rewards = draw(6, 4, 1).expand(-1, 2)
    torch.testing.assert_close(
        advantages(rewards, [1.0, 0.5], 4, "gd2po"), advantages(rewards, [1.0, 0.5], 4, "gdpo")
    )


def test_gd2po_of_rewards_that_all_disagree_learns_nothing():
    rewards = draw(6, 4, 1)
    result = advantages(torch.cat([rewards, -rewards], dim=1), [1.0, 0.5], 4, "gd2po")
    assert torch.equal(result, torch.zeros_like(result))


def test_gd2po_counts_only_completions_that_were_scored():
    """The share of a group is that of its scored completions: 2 of 3 here, not 2 or 3 of 4."""
    three = torch.tensor([[0, 0], [2, 2], [1.5, 0.5]])
    missing = torch.full((1, 2), math.nan)
    agreeing = torch.tensor([[0, 0], [1, 1], [1, 1], [0, 0]])
    result = advantages(torch.cat([three, missing, agreeing]), [1.0, 1.0], 4, "gd2po")
    terms = ((three - three.mean(dim=0)) / three.std(dim=0)).sum(dim=1)[:2].double() * 2 / 3
    values = torch.cat([terms, math.sqrt(3) * torch.tensor([-1.0, 1, 1, -1]).double()])
    whitened = (values - values.mean()) / values.std()
    expected = torch.cat([whitened[:2], torch.zeros(2).double(), whitened[2:]])
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


# Saturation


@pytest.mark.parametrize("mode", USES_GAMMA)
@pytest.mark.parametrize("gamma", [0.25, 1.0])
def test_gamma_weighs_by_the_distance_to_the_highest_value(mode, gamma):
    rewards = draw(8, 4, 2)
    rewards[:, 0] = 6 * rewards[:, 0].sqrt() - 3
    ranges = [(-3.0, 3.0), (0.0, 1.0)]
    left = [(3 - rewards[:, 0].mean()) / 6, 1 - rewards[:, 1].mean()]
    weights = [0.5 * float(left[0]) ** gamma, float(left[1]) ** gamma]
    torch.testing.assert_close(
        advantages(rewards, [0.5, 1.0], 4, mode, gamma=gamma, ranges=ranges),
        advantages(rewards, weights, 4, mode),
    )


@pytest.mark.parametrize("mode", NORMALIZATIONS)
def test_gamma_zero_is_the_mode_itself_to_the_bit(mode):
    rewards = draw(8, 4, 2)
    expected = compute_advantages(rewards, torch.tensor([1.0, 0.5]), 4, mode)
    result = compute_advantages(
        rewards, torch.tensor([1.0, 0.5]), 4, mode, gamma=0.0, baseline="group_mean"
    )
    assert torch.equal(result, expected)


@pytest.mark.parametrize("mode", NORMALIZATIONS)
def test_gamma_changes_exactly_the_modes_that_use_it(mode):
    rewards = draw(8, 4, 2) ** torch.tensor([0.3, 3.0])
    plain = advantages(rewards, [1.0, 1.0], 4, mode, ranges=UNIT)
    changed = advantages(rewards, [1.0, 1.0], 4, mode, ranges=UNIT, gamma=1.0)
    assert torch.equal(plain, changed) == (mode not in USES_GAMMA)


@CALM
@given(
    batches,
    st.floats(0.01, 1),
    st.sampled_from(USES_GAMMA),
    st.sampled_from([0.0, 1.0, math.nan]),
)
def test_gamma_is_finite_whatever_is_saturated_or_missing(case, gamma, mode, constant):
    group, rows = case
    rewards = torch.tensor(rows).double()
    rewards[:, 1] = constant
    result = advantages(rewards, [1.0, 1.0], group, mode, 1e-4, gamma=gamma, ranges=UNIT)
    assert result.isfinite().all()
    top = advantages(torch.ones_like(rewards), [1.0, 1.0], group, mode, gamma=gamma, ranges=UNIT)
    assert torch.equal(top, torch.zeros_like(top))


def test_a_reward_outside_of_its_range_counts_as_at_its_end():
    rewards = 1 + draw(8, 4, 2)
    rewards[:, 1] -= 1
    result = advantages(rewards, [1.0, 1.0], 4, "gdpo", gamma=0.5, ranges=UNIT)
    torch.testing.assert_close(result, advantages(rewards[:, 1:], [1.0], 4, "gdpo"))


@pytest.mark.parametrize("ranges", [None, [(0.0, 1.0), UNKNOWN_RANGE], [(0.0, 1.0), (1.0, 1.0)]])
def test_gamma_needs_ranges(ranges):
    rewards = draw(4, 4, 2)
    with pytest.raises(ValueError, match="needs to know the range"):
        advantages(rewards, [1.0, 1.0], 4, "gdpo", gamma=0.5, ranges=ranges)
    if ranges is not None:
        result = advantages(rewards, [1.0, 0.0], 4, "gdpo", gamma=0.5, ranges=ranges)
        assert result.isfinite().all(), "a reward without a weight needs no range"


# Leave one out


def others(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """`r_i - mean of the others`, by its definition."""
    values = rewards.view(-1, group)
    return (values - (values.sum(dim=1, keepdim=True) - values) / (group - 1)).flatten()


@CALM
@given(batches)
def test_leave_one_out_of_a_sum_is_its_definition(case):
    group, rows = case
    rewards = torch.tensor(rows).double()
    result = advantages(rewards, [1.0, 0.5], group, "grpo_no_std", baseline="leave_one_out")
    expected = others(rewards @ torch.tensor([1.0, 0.5], dtype=torch.float64), group)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=1e-9)


def test_leave_one_out_of_each_reward_before_the_sum_is_the_same_thing():
    rewards = draw(6, 4, 2)
    result = advantages(rewards, [1.0, 0.5], 4, "gdpo_no_batch_norm", baseline="leave_one_out")
    std = rewards.view(6, 4, 2).std(dim=1).repeat_interleave(4, dim=0)
    expected = others(rewards[:, 0], 4) / std[:, 0] + 0.5 * others(rewards[:, 1], 4) / std[:, 1]
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("mode", NORMALIZATIONS)
@pytest.mark.parametrize("group", [2, 4, 7])
def test_leave_one_out_stretches_the_modes_that_do_not_whiten(mode, group):
    rewards = draw(8, group, 2)
    plain = advantages(rewards, [1.0, 0.5], group, mode)
    result = advantages(rewards, [1.0, 0.5], group, mode, baseline="leave_one_out")
    if mode in USES_BASELINE:
        torch.testing.assert_close(result, plain * group / (group - 1))
    else:
        assert torch.equal(result, plain)
        # The algebra behind `ignores`: stretched before whitening, the result is what it was.
        stretched = {"gdpo": "gdpo_no_batch_norm", "gdpo_no_std": "grpo_no_std"}.get(mode)
        if stretched is not None:
            before = advantages(rewards, [1.0, 0.5], group, stretched, baseline="leave_one_out")
            torch.testing.assert_close((before - before.mean()) / before.std(), plain)


def test_leave_one_out_counts_only_completions_that_were_scored():
    rewards = draw(3, 4, 2)
    rewards[1] = math.nan
    rewards[4:7] = math.nan  # a group of one has no others, so nothing to learn from
    result = advantages(rewards, [1.0, 0.5], 4, "grpo_no_std", baseline="leave_one_out")
    three = advantages(rewards[[0, 2, 3]], [1.0, 0.5], 3, "grpo_no_std", baseline="leave_one_out")
    torch.testing.assert_close(result[[0, 2, 3]], three)
    assert torch.equal(result[4:8], torch.zeros(4, dtype=torch.float64))
    assert result[1] == 0


def test_every_ignored_parameter_exists():
    assert {name for info in NORMALIZATIONS.values() for name in info.ignores} <= set(PARAMETERS)
