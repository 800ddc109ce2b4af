"""Facts about the normalization modes, by closed forms and against TRL's own code."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.training.normalization import compute_advantages
from tests.support import training as training_support
from tests.support.training import build_plain_trainer, write_policy

MODES = tuple(NORMALIZATIONS)
SUM_MODES = ("grpo", "grpo_no_std", "grpo_batch")
USES_GAMMA, USES_BASELINE = (
    [mode for mode, info in NORMALIZATIONS.items() if name not in info.ignores]
    for name in ("gamma", "baseline")
)
TINY = 1e-12
"""An eps that does not blur the comparison with closed forms."""
CALM = settings(deadline=None, database=None, derandomize=True)  # a loaded machine is no failure
UNIT = [(0.0, 1.0)] * 2


def draw(prompts: int, group: int, rewards: int, seed: int = 0) -> torch.Tensor:
    """Binary rewards in float64, some groups dead in some rewards."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (prompts * group, rewards), generator=generator).double()


def draw_shares(prompts: int, group: int, rewards: int) -> torch.Tensor:
    """Rewards in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(prompts * group, rewards, generator=generator, dtype=torch.float64)


def advantages(rewards, weights, group, mode, eps=1e-4, **more):
    weights = torch.tensor(weights, dtype=rewards.dtype)
    return compute_advantages(rewards, weights, group, mode, eps, **more)


def exact(rewards, weights, group, mode, eps=TINY, **more):
    return advantages(rewards.double(), weights, group, mode, eps, **more)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def count_distinct(groups: torch.Tensor, mode: str, eps: float = TINY, decimals: int = 6) -> int:
    """Distinct sorted tuples of advantages over groups [P, G, K]; one call, if P may share it."""
    prompts, group, rewards = groups.shape
    weights = [1.0] * rewards
    if mode == "gdpo":  # whitening spans the batch, so each group has to be one of its own
        result = torch.stack([exact(g, weights, group, mode, eps) for g in groups])
    else:
        result = exact(groups.reshape(-1, rewards), weights, group, mode, eps).view(prompts, group)
    rounded = (result.sort(dim=1).values * 10**decimals).round()
    return len(torch.unique(rounded, dim=0))


def unordered(patterns: list[tuple[int, ...]], group: int) -> torch.Tensor:
    """Every multiset of `group` rollouts, [P, G, K]."""
    return torch.tensor(list(itertools.combinations_with_replacement(patterns, group)))


def binary(rewards: int) -> list[tuple[int, ...]]:
    return list(itertools.product((0, 1), repeat=rewards))


def columns(group: int, rewards: int) -> torch.Tensor:
    """Every group up to the order of its rewards, which equal weights ignore: far fewer."""
    return unordered(binary(group), rewards).transpose(1, 2)


TOY_TABLE = {
    "grpo": [2, 4, 7, 11, 16, 22, 29, 37, 46, 56, 67],
    "grpo_no_std": [3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 78],
    "gdpo_no_batch_norm": [3, 6, 14, 26, 38, 59, 81, 109, 145, 186, 230],
}


@pytest.mark.parametrize("mode", TOY_TABLE)
def test_toy_table_two_rewards(mode):
    assert [count_distinct(unordered(binary(2), g), mode) for g in range(2, 13)] == TOY_TABLE[mode]


@pytest.mark.parametrize(
    ("mode", "counts"),
    [("grpo", [7, 14, 23, 41, 56, 89, 119]), ("grpo_no_std", [10, 20, 35, 56, 84, 120, 165])],
)
def test_toy_table_four_rollouts_of_summed_rewards(mode, counts):
    # One pattern a sum is enough, since these modes see nothing but the sum.
    patterns = [[tuple(int(i < s) for i in range(k)) for s in range(k + 1)] for k in range(2, 9)]
    assert [count_distinct(unordered(p, 4), mode) for p in patterns] == counts
    assert [count_distinct(columns(4, k), mode) for k in range(2, 5)] == counts[:3]


def test_toy_table_of_gdpo_and_its_rounding():
    counts = [count_distinct(columns(4, k), "gdpo_no_batch_norm") for k in range(2, 7)]
    assert counts == [14, 45, 127, 318, 722]
    for group, apart, together in ((4, 14, 9), (8, 81, 63)):  # one prompt per batch collapses it
        groups = unordered(binary(2), group)
        assert count_distinct(groups, "gdpo_no_batch_norm") == apart
        assert count_distinct(groups, "gdpo") == together
    groups = unordered(binary(2), 4)  # an eps that is not small needs rounding
    assert count_distinct(groups, "grpo", eps=1e-4, decimals=3) == 7
    for mode in ("grpo", "grpo_no_std"):
        assert count_distinct(groups, mode, eps=1e-4, decimals=9) == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [100.0, 0.01, 1e-6])
def test_overall_scale_of_the_weights_cancels(mode, scale):
    rewards, weights = draw(8, 4, 3), tensor(1.0, 0.25, 0.5)
    expected = compute_advantages(rewards, weights, 4, mode)
    scaled = compute_advantages(rewards, scale * weights, 4, mode)
    assert_close(scaled, expected, rtol=1e-12, atol=1e-12)


def test_gdpo_ignores_an_affine_change_of_one_reward_and_grpo_does_not():
    rewards = draw(8, 8, 2)
    changed = rewards * tensor(1, 7) - tensor(0, 3)
    gdpo, grpo = (
        (advantages(changed, [1.0, 0.5], 8, mode) - advantages(rewards, [1.0, 0.5], 8, mode)).abs()
        for mode in ("gdpo", "grpo")
    )
    assert gdpo.max() <= 3e-4
    assert grpo.max() > 0.1


@pytest.mark.parametrize(("mode", "factor"), [("grpo", 1), ("grpo_batch", 1), ("grpo_no_std", 10)])
def test_sum_modes_identify_only_weight_times_scale(mode, factor):
    rewards = draw(8, 4, 2)
    expected = advantages(rewards, [1.0, 0.5], 4, mode)
    assert_close(advantages(rewards * tensor(1, 4), [1.0, 0.125], 4, mode), expected)
    plain = exact(rewards, [1.0, 0.5], 4, mode)
    assert_close(exact(10 * rewards, [1.0, 0.5], 4, mode), factor * plain)


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_of_weight_zero_or_without_any_score_equals_a_dropped_one(mode):
    rewards = draw(8, 4, 3)
    rewards[5, 0] = rewards[5, 2] = math.nan  # then only the reward without weight is scored
    dropped = advantages(rewards[:, [0, 2]], [1.0, 0.5], 4, mode)
    assert torch.equal(advantages(rewards, [1.0, 0.0, 0.5], 4, mode), dropped)
    rewards = draw(6, 4, 3, seed=5)
    rewards[:, 1] = math.nan
    dropped = advantages(rewards[:, [0, 2]], [1.0, 0.25], 4, mode)
    assert_close(advantages(rewards, [1.0, 0.5, 0.25], 4, mode), dropped)


def test_groups_of_two_reduce_each_reward_to_its_sign():
    rewards, half = tensor([0.1], [0.9], [5.0], [-2.0], [3.0], [3.0]), math.sqrt(0.5)
    result = exact(rewards, [1.0], 2, "gdpo_no_batch_norm")
    assert_close(result, tensor(-half, half, half, -half, 0, 0))


@pytest.mark.parametrize("group", [2, 4, 8])
def test_single_reward_gdpo_is_grpo_at_another_scale(group):
    rewards = draw(12, group, 1)
    rewards[:group] = 1
    grouped = rewards.view(12, group)
    dead = float((grouped == grouped[:, :1]).all(dim=1).double().mean())
    count = len(rewards)
    scale = 1 / math.sqrt((1 - dead) * (group - 1) / group * count / (count - 1))
    assert abs(scale - 1) > 0.01, "the modes must differ, or this could not tell a silent fallback"
    gdpo, grpo = (exact(rewards, [1.0], group, mode) for mode in ("gdpo", "grpo"))
    assert_close(gdpo, scale * grpo)


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
    result = exact(tensor([0, 0], [1, 2], [1, 0], [1, 1]), [1.0, 1.0], 2, mode)
    assert_close(result, tensor(*expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "grpo"])
def test_modes_differ(mode):
    ours, grpo = (advantages(draw(8, 4, 3), [1.0, 0.5, 0.25], 4, one) for one in (mode, "grpo"))
    assert not torch.allclose(ours, grpo, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_groups_get_exactly_zero(mode, dtype):
    generator = torch.Generator().manual_seed(1)
    rewards = (6 * torch.rand(9, 1, 2, generator=generator, dtype=dtype) - 3).expand(9, 7, 2)
    rewards = rewards.reshape(63, 2) * 200
    assert torch.equal(advantages(rewards, [1.0, 0.3], 7, mode), torch.zeros(63, dtype=dtype))
    rewards[56:] = torch.rand(7, 1, generator=generator, dtype=dtype)  # both agree: gd2po keeps all
    result = advantages(rewards, [1.0, 0.3], 7, mode)
    assert torch.equal(result[:56], torch.zeros(56, dtype=dtype))
    assert (result[56:] != 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_rewards_that_cancel_leave_no_rounding_error(mode):
    result = exact(tensor(*[[0.1, 0.3], [0.3, 0.1]] * 4), [1.0, 1.0], 2, mode)
    assert torch.equal(result, torch.zeros(8).double())


@pytest.mark.parametrize("mode", MODES)
def test_a_completion_without_any_reward_gets_zero_and_enters_no_statistic(mode):
    rewards = draw(6, 4, 2, seed=3)
    rewards[7] = math.nan
    result = advantages(rewards, [1.0, 0.5], 4, mode)
    assert result[7] == 0
    assert result.isfinite().all()
    # Its group is one of three: those three alone must come out as in a batch of groups of three.
    if mode in ("grpo", "grpo_no_std", "gdpo_no_batch_norm"):
        assert_close(result[4:7], advantages(rewards[4:7], [1.0, 0.5], 3, mode))
    nothing = torch.full((8, 2), math.nan)
    assert torch.equal(advantages(nothing, [1.0, 1.0], 4, mode), torch.zeros(8))
    assert advantages(torch.zeros(0, 2), [1.0, 1.0], 4, mode).shape == (0,)


@pytest.mark.parametrize("mode", [*SUM_MODES, "gdpo_no_std"])
def test_a_missing_reward_counts_as_its_groups_mean(mode):
    missing, filled = draw(6, 4, 3, seed=4), draw(6, 4, 3, seed=4)
    missing[5, 1], filled[5, 1] = math.nan, filled[[4, 6, 7], 1].mean()
    ours, theirs = (advantages(each, [1.0, 0.5, 0.25], 4, mode) for each in (missing, filled))
    assert_close(ours, theirs)


VALUE = st.one_of(st.just(math.nan), st.floats(-200, 200, width=32), st.sampled_from([0.0, 1.0]))


def draw_groups(row, least: int):
    """A group size, and rows of whole groups, `least` of them or more, as one batch."""
    return st.integers(2, 5).flatmap(
        lambda group: st.tuples(
            st.just(group),
            st.lists(row, min_size=least * group, max_size=4 * group).map(
                lambda rows: torch.tensor(rows[: len(rows) // group * group])
            ),
        )
    )


@CALM
@given(draw_groups(st.lists(VALUE, min_size=2, max_size=2), 1), st.sampled_from(MODES))
def test_any_rewards_give_finite_advantages_that_follow_their_groups(case, mode):
    group, rewards = case
    result = advantages(rewards, [1.0, 0.3], group, mode)
    assert result.isfinite().all()
    assert result.dtype == torch.float32
    moved = rewards.unflatten(0, (-1, group)).flip(0).roll(1, dims=1).flatten(0, 1)
    expected = result.view(-1, group).flip(0).roll(1, dims=1).flatten()
    assert_close(advantages(moved, [1.0, 0.3], group, mode), expected, rtol=1e-3, atol=1e-4)


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


BRANCHES = {
    "gdpo": ("normalize_then_sum", "group"),
    "grpo": ("sum_then_normalize", "group"),
    "grpo_no_std": ("sum_then_normalize", "none"),
    "grpo_batch": ("sum_then_normalize", "batch"),
}
"""The code of TRL that each mode has to equal."""


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory):
    """Compute TRL's own advantages."""
    folder = tmp_path_factory.mktemp("trl")
    trainer = build_plain_trainer(write_policy(folder / "policy"), folder / "out")

    def compute(rewards, weights, group, mode, scale_rewards=None):
        aggregation, scale = BRANCHES[mode]
        return training_support.compute_trl_advantages(
            trainer, rewards, weights, group, aggregation, scale_rewards or scale
        )

    return compute


@pytest.mark.parametrize("mode", BRANCHES)
@pytest.mark.parametrize("group", [2, 4, 7])
def test_equal_to_trl_where_trl_is_right(of_trl, mode, group):
    generator = torch.Generator().manual_seed(group)
    rewards = draw(8, group, 3, seed=group)
    rewards[:, 2] = 6 * torch.rand(8 * group, generator=generator, dtype=torch.float64) - 3
    theirs = of_trl(rewards, [0.5, 1.0, 0.125], group, mode)
    assert theirs.dtype == torch.float64
    ours = advantages(rewards, [0.5, 1.0, 0.125], group, mode)
    assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", BRANCHES)
def test_equal_to_trl_with_missing_rewards(of_trl, mode):
    rewards = draw(8, 4, 3, seed=8)
    rewards[9] = math.nan
    if mode == "gdpo":
        rewards[3, 1] = rewards[17, 0] = math.nan
    ours, theirs = (
        function(rewards, [1.0, 0.5, 0.25], 4, mode) for function in (advantages, of_trl)
    )
    assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_trl_takes_a_missing_reward_for_zero_in_the_sum_modes(of_trl):
    rewards = torch.ones(8, 2, dtype=torch.float64)
    rewards[0, 1] = math.nan
    assert of_trl(rewards, [1.0, 1.0], 4, "grpo_no_std")[0] == -0.75
    ours = advantages(rewards, [1.0, 1.0], 4, "grpo_no_std")
    assert torch.equal(ours, torch.zeros(8, dtype=torch.float64))


def test_trl_is_wrong_in_dead_groups_and_we_are_exactly_zero(of_trl):
    generator = torch.Generator().manual_seed(0)
    rewards = (6 * torch.rand(8, 1, 2, generator=generator) - 3).expand(8, 7, 2).reshape(56, 2)
    for dead, mode, error in ((rewards, "gdpo", 0.1), (199 + rewards, "grpo", 0.01)):
        assert of_trl(dead, [1.0, 1.0], 7, mode).abs().max() > error
        assert torch.equal(advantages(dead, [1.0, 1.0], 7, mode), torch.zeros(56))


def test_trl_gdpo_ignores_scale_rewards(of_trl):
    scales = ("group", "none", "batch")
    first, *others = [of_trl(draw(8, 4, 2), [1.0, 0.5], 4, "gdpo", scale) for scale in scales]
    assert all(torch.equal(first, other) for other in others)


BATCHES = draw_groups(st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 2), 2)
WEIGHT = st.floats(0.05, 2)


@CALM
@given(BATCHES, WEIGHT)
def test_dvao_is_the_spread_weighted_average_of_gdpos_terms_in_grpos_direction(case, weight):
    group, rewards = case
    dvao, grpo = (
        exact(rewards, [1.0, weight], group, mode).view(-1, group)
        for mode in ("dvao", "grpo_no_std")
    )
    for block, values, theirs in zip(rewards.double().view(-1, group, 2), dvao, grpo, strict=True):
        product = (values * theirs).sum()
        assert_close(product, values.norm() * theirs.norm(), atol=1e-9, rtol=1e-9)
        std = block.std(dim=0)
        terms = (block - block.mean(dim=0)) / std.clamp(min=1e-9)
        spread = std * tensor(1.0, weight)
        if spread.sum() == 0:
            assert torch.equal(values, torch.zeros(group, dtype=torch.float64))
            continue
        assert_close(values, (terms * spread).sum(dim=1) / spread.sum())
        bound = terms[:, std > 0].abs().max(dim=1).values
        assert (values.abs() <= bound + 1e-9).all(), "an average is within its terms"


def test_dvao_weighs_by_spread_and_gdpo_does_not():
    rewards = tensor([0.0, 0.1], [1.0, 0.0])
    # The wide reward wins: (1 - .1) / (1 + .1) of what it would get alone.
    expected = tensor(-1.0, 1.0) * math.sqrt(0.5) * 0.9 / 1.1
    assert_close(exact(rewards, [1.0, 1.0], 2, "dvao"), expected)
    assert_close(exact(rewards, [1.0, 1.0], 2, "gdpo_no_batch_norm"), tensor(0, 0))


def test_modes_of_one_reward_or_of_rewards_that_agree_are_simpler_ones():
    rewards = draw_shares(6, 4, 1)
    assert_close(exact(rewards, [1.0], 4, "dvao"), exact(rewards, [1.0], 4, "grpo"))
    both = rewards.expand(-1, 2)
    assert_close(exact(both, [1.0, 0.5], 4, "gd2po"), exact(both, [1.0, 0.5], 4, "gdpo"))
    disagreeing = torch.cat([rewards, -rewards], dim=1)
    result = exact(disagreeing, [1.0, 0.5], 4, "gd2po")
    assert torch.equal(result, torch.zeros_like(result)), "nothing is learnt"


@CALM
@given(BATCHES, WEIGHT)
def test_saw_is_gdpo_with_weights_times_the_coefficient_of_variation(case, weight):
    group, rewards = case
    rewards = rewards.double() + 0.5
    weights = rewards.std(dim=0) / rewards.mean(dim=0) * tensor(1.0, weight)
    if weights.max() < 1e-9:
        return
    result = exact(rewards, [1.0, weight], group, "saw", eps=1e-9)
    expected = exact(rewards, weights.tolist(), group, "gdpo", eps=1e-9)
    assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_saw_counts_the_mean_from_the_lowest_value_of_the_range():
    """In [-3, 3], as in the authors' code: shifted by 3, the reward is one in [0, 6]."""
    rewards = draw_shares(8, 4, 2)
    wide = rewards * tensor(6, 1) - tensor(3, 0)
    result = exact(wide, [1.0, 1.0], 4, "saw", ranges=[(-3.0, 3.0), (0.0, 1.0)])
    assert_close(result, exact(rewards, [1.0, 1.0], 4, "saw", ranges=UNIT))
    ratio = rewards.std(dim=0) / rewards.mean(dim=0)
    assert_close(result, exact(rewards, ratio.tolist(), 4, "gdpo"))
    plain, scaled = (exact(r, [1.0, 1.0], 4, "saw") for r in (rewards, rewards * tensor(7, 1)))
    assert_close(scaled, plain)


def test_saw_leaves_a_reward_alone_whose_mean_is_zero_and_drops_one_that_is_constant():
    rewards = draw_shares(8, 4, 2)
    rewards[:, 0] -= rewards[:, 0].mean()
    result = exact(rewards, [1.0, 1.0], 4, "saw", eps=1e-8, ranges=[UNKNOWN_RANGE] * 2)
    assert result.isfinite().all()
    assert_close(result, exact(rewards[:, :1], [1.0], 4, "gdpo", eps=1e-8), atol=1e-5, rtol=1e-5)
    rewards = draw_shares(8, 4, 2)
    rewards[:, 1] = 0.7
    alone = exact(rewards[:, :1], [1.0], 4, "gdpo")
    assert_close(exact(rewards, [0.3, 1.0], 4, "saw"), alone)


def test_gd2po_drops_who_disagrees_and_weighs_a_group_by_the_share_it_keeps():
    # Group 1 keeps its first and last completion: sums of +-2a, halved. Group 2 keeps all: +-a.
    first, second = [[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 3], [0, 3], [1, 3], [1, 3]]
    value = math.sqrt(5 / 6)  # six values of +-a, whitened
    result = exact(tensor(*first, *second), [1.0, 1.0], 4, "gd2po")
    assert_close(result, tensor(-1, 0, 0, 1, -1, -1, 1, 1) * value)


@CALM
@given(BATCHES, WEIGHT)
def test_gd2po_is_its_definition_completion_by_completion(case, weight):
    group, rewards = case
    rewards = rewards.double()
    kept: dict[int, float] = {}
    for start in range(0, len(rewards), group):
        block = rewards[start : start + group]
        terms = (block - block.mean(dim=0)) / block.std(dim=0).clamp(min=1e-9)
        agreeing = [i for i, (a, b) in enumerate(terms.tolist()) if a * b > -1e-12]
        for i in agreeing:
            total = float(terms[i, 0] + weight * terms[i, 1])
            kept[start + i] = total * len(agreeing) / group
    values = tensor(*kept.values())
    expected = torch.zeros(len(rewards), dtype=torch.float64)
    if len(kept) > 1 and values.std() > 1e-9:
        expected[list(kept)] = (values - values.mean()) / values.std()
    alive = (rewards.view(-1, group, 2).std(dim=1) > 0).any(dim=1).repeat_interleave(group)
    result = exact(rewards, [1.0, weight], group, "gd2po")
    assert_close(result, expected * alive, atol=1e-6, rtol=1e-6)


def test_gd2po_counts_only_completions_that_were_scored():
    """The share of a group is that of its scored completions: 2 of 3 here, not 2 or 3 of 4."""
    three, missing = tensor([0, 0], [2, 2], [1.5, 0.5]), tensor([math.nan] * 2)
    agreeing = tensor([0, 0], [1, 1], [1, 1], [0, 0])
    result = exact(torch.cat([three, missing, agreeing]), [1.0, 1.0], 4, "gd2po")
    terms = ((three - three.mean(dim=0)) / three.std(dim=0)).sum(dim=1)[:2] * 2 / 3
    values = torch.cat([terms, math.sqrt(3) * tensor(-1.0, 1, 1, -1)])
    whitened = (values - values.mean()) / values.std()
    expected = torch.cat([whitened[:2], tensor(0, 0), whitened[2:]])
    assert_close(result, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", USES_GAMMA)
@pytest.mark.parametrize("gamma", [0.25, 1.0])
def test_gamma_weighs_by_the_distance_to_the_highest_value(mode, gamma):
    rewards = draw_shares(8, 4, 2)
    rewards[:, 0] = 6 * rewards[:, 0].sqrt() - 3
    ranges = [(-3.0, 3.0), (0.0, 1.0)]
    left = [(3 - rewards[:, 0].mean()) / 6, 1 - rewards[:, 1].mean()]
    weights = [0.5 * float(left[0]) ** gamma, float(left[1]) ** gamma]
    result = exact(rewards, [0.5, 1.0], 4, mode, gamma=gamma, ranges=ranges)
    assert_close(result, exact(rewards, weights, 4, mode))


@pytest.mark.parametrize("mode", MODES)
def test_gamma_changes_exactly_the_modes_that_use_it_and_zero_none_to_the_bit(mode):
    rewards = draw_shares(8, 4, 2)
    plain = advantages(rewards, [1.0, 0.5], 4, mode)
    off = advantages(rewards, [1.0, 0.5], 4, mode, gamma=0.0, baseline="group_mean")
    assert torch.equal(off, plain)
    rewards = rewards ** tensor(0.3, 3)
    plain = exact(rewards, [1.0, 1.0], 4, mode, ranges=UNIT)
    changed = exact(rewards, [1.0, 1.0], 4, mode, ranges=UNIT, gamma=1.0)
    assert torch.equal(plain, changed) == (mode not in USES_GAMMA)


@CALM
@given(BATCHES, st.floats(0.01, 1), st.sampled_from(USES_GAMMA), st.sampled_from([0, 1, math.nan]))
def test_gamma_is_finite_whatever_is_saturated_or_missing(case, gamma, mode, constant):
    group, rewards = case
    rewards = rewards.clone()
    rewards[:, 1] = constant
    options = {"gamma": gamma, "ranges": UNIT}
    assert exact(rewards, [1.0, 1.0], group, mode, 1e-4, **options).isfinite().all()
    top = exact(torch.ones_like(rewards), [1.0, 1.0], group, mode, **options)
    assert torch.equal(top, torch.zeros_like(top))


def test_a_reward_outside_of_its_range_counts_as_at_its_end():
    rewards = draw_shares(8, 4, 2) + tensor(1, 0)
    result = exact(rewards, [1.0, 1.0], 4, "gdpo", gamma=0.5, ranges=UNIT)
    assert_close(result, exact(rewards[:, 1:], [1.0], 4, "gdpo"))


@pytest.mark.parametrize("ranges", [None, [(0.0, 1.0), UNKNOWN_RANGE], [(0.0, 1.0), (1.0, 1.0)]])
def test_gamma_needs_ranges(ranges):
    rewards = draw_shares(4, 4, 2)
    with pytest.raises(ValueError, match="needs to know the range"):
        exact(rewards, [1.0, 1.0], 4, "gdpo", gamma=0.5, ranges=ranges)
    if ranges is not None:
        result = exact(rewards, [1.0, 0.0], 4, "gdpo", gamma=0.5, ranges=ranges)
        assert result.isfinite().all(), "a reward without a weight needs no range"


def subtract_others(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """`r_i - mean of the others`, by its definition."""
    values = rewards.view(-1, group)
    return (values - (values.sum(dim=1, keepdim=True) - values) / (group - 1)).flatten()


LEAVE_ONE_OUT = {"baseline": "leave_one_out"}


@CALM
@given(BATCHES)
def test_leave_one_out_of_a_sum_is_its_definition(case):
    group, rewards = case
    result = exact(rewards, [1.0, 0.5], group, "grpo_no_std", **LEAVE_ONE_OUT)
    expected = subtract_others(rewards.double() @ tensor(1.0, 0.5), group)
    assert_close(result, expected, atol=1e-9, rtol=1e-9)


def test_leave_one_out_of_each_reward_before_the_sum_is_the_same_thing():
    rewards = draw_shares(6, 4, 2)
    result = exact(rewards, [1.0, 0.5], 4, "gdpo_no_batch_norm", **LEAVE_ONE_OUT)
    std = rewards.view(6, 4, 2).std(dim=1).repeat_interleave(4, dim=0)
    first, second = (subtract_others(rewards[:, i], 4) / std[:, i] for i in (0, 1))
    assert_close(result, first + 0.5 * second)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", [2, 4, 7])
def test_leave_one_out_stretches_the_modes_that_do_not_whiten(mode, group):
    rewards = draw_shares(8, group, 2)
    plain = exact(rewards, [1.0, 0.5], group, mode)
    result = exact(rewards, [1.0, 0.5], group, mode, **LEAVE_ONE_OUT)
    if mode in USES_BASELINE:
        assert_close(result, plain * group / (group - 1))
        return
    assert torch.equal(result, plain)
    # The algebra behind `ignores`: stretched before whitening, the result is what it was.
    stretched = {"gdpo": "gdpo_no_batch_norm", "gdpo_no_std": "grpo_no_std"}.get(mode)
    if stretched is not None:
        before = exact(rewards, [1.0, 0.5], group, stretched, **LEAVE_ONE_OUT)
        assert_close((before - before.mean()) / before.std(), plain)


def test_leave_one_out_counts_only_completions_that_were_scored():
    rewards = draw_shares(3, 4, 2)
    rewards[1] = math.nan
    rewards[4:7] = math.nan  # a group of one has no others, so nothing to learn from
    result = exact(rewards, [1.0, 0.5], 4, "grpo_no_std", **LEAVE_ONE_OUT)
    three = exact(rewards[[0, 2, 3]], [1.0, 0.5], 3, "grpo_no_std", **LEAVE_ONE_OUT)
    assert_close(result[[0, 2, 3]], three)
    assert torch.equal(result[4:8], torch.zeros(4, dtype=torch.float64))
    assert result[1] == 0


def test_every_ignored_parameter_exists():
    assert {name for info in NORMALIZATIONS.values() for name in info.ignores} <= set(PARAMETERS)
