"""Length shapes, conditions and partial credit: closed forms, and missing scores."""

import dataclasses
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gdpo_tune import rewards
from gdpo_tune.core.parameters import (
    LENGTH_PARAMETERS,
    PARAMETERS,
    PARTIAL_CREDIT,
    build_shaping,
    compute_threshold,
    list_parameters,
)
from gdpo_tune.core.shaping import (
    LengthFall,
    RewardCondition,
    Shaping,
    apply_condition,
    compute_fall,
)
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.training.evaluation import build_reward_functions
from tests.support.data import score_one
from tests.support.tables import cases
from tests.support.training import SETTINGS, TOY, ToyTask, build_trial_config


def build(config, info=TOY):
    return build_shaping(config.params, config.training, info)


CALM = settings(deadline=None, database=None, derandomize=True)
VALUE = st.one_of(st.none(), st.floats(-3, 3), st.sampled_from([0.0, 1.0]))

# Lengths


def test_a_ramp_falls_from_the_limit_to_the_longest():
    values = [compute_fall(tokens, longest=8, fall=8 - 4) for tokens in range(10)]
    assert values == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_overlong_follows_equation_13_of_dapo():
    """The paper's own numbers: 20480 tokens at most, a cache of 4096, expected at most 16384."""
    punishment = {0: 0, 16384: 0, 16385: -1 / 4096, 18432: -0.5, 20479: -4095 / 4096, 20480: -1}
    for tokens, value in {**punishment, 20481: -1}.items():
        assert compute_fall(tokens, 20480, 4096) - 1 == pytest.approx(value, abs=1e-12)
    share = PARAMETERS["length_cache"].default
    assert share * 20480 == 4096


@CALM
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 450))
def test_a_ramp_never_pays_less_than_the_step(limit, width, tokens):
    longest = limit + width
    value = compute_fall(tokens, longest, width)
    assert compute_fall(tokens + 1, longest, width) <= value
    assert score_one(rewards.length, "", tokens, limit) <= value


@CALM
@given(st.integers(2, 300), st.floats(0.01, 1), st.integers(0, 400))
def test_overlong_is_equation_13_plus_1_at_any_length(longest, share, tokens):
    cache = share * longest
    punishment = -1.0
    if tokens <= longest - cache:
        punishment = 0.0
    elif tokens <= longest:
        punishment = (longest - cache - tokens) / cache
    value = compute_fall(tokens, longest, cache)
    assert value == pytest.approx(punishment + 1, abs=1e-9)
    assert 0 <= compute_fall(tokens + 1, longest, cache) <= value <= 1


# Conditions


@CALM
@given(st.lists(st.tuples(VALUE, VALUE), max_size=8), st.floats(-3, 3))
@example([(1.0, 1.0), (0.5, 0.9), (-2.0, 1.0), (1.0, 0.0)], 1.0)
@example([(None, 1.0), (1.0, None), (1.0, math.nan)], 0.5)
def test_a_condition_is_the_product_with_an_indicator(rows, least):
    """A missing score stays missing."""
    values, others = [row[0] for row in rows], [row[1] for row in rows]
    assert apply_condition(values, others, least) == [
        None if None in row or math.isnan(row[1]) else row[0] * (row[1] >= least) for row in rows
    ]


def test_a_threshold_is_a_share_of_the_range_and_tolerates_rounding():
    assert compute_threshold((-3, 3), 1.0) <= 6 * 0.1 / 0.1 - 3
    assert compute_threshold((-3, 3), 1.0) == pytest.approx(3)
    assert compute_threshold((-3, 3), 0.75) == pytest.approx(1.5)
    assert compute_threshold((0, 1), 0.0) <= 0
    assert compute_threshold((0, 1), 0.3) < 0.1 * 3 < 0.3 + 1e-6
    with pytest.raises(ValueError, match="range of the reward"):
        compute_threshold(UNKNOWN_RANGE, 1.0)


def test_chains_and_circles_read_the_rewards_before_shaping():
    rewards = {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 1.0]}
    chain = {"a": RewardCondition("b", 1), "b": RewardCondition("c", 1)}
    for conditions in (chain, dict(reversed(chain.items()))):
        shaped = Shaping(conditions=conditions).apply(rewards, [1, 1])
        assert shaped == {**rewards, "b": [0.0, 1.0]}
    circle = {"a": RewardCondition("c", 1), "c": RewardCondition("a", 1)}
    shaped = Shaping(conditions=circle).apply({"a": [1.0, 0.0], "c": [0.0, 1.0]}, [1, 1])
    assert shaped == {"a": [0.0, 0.0], "c": [0.0, 0.0]}
    assert rewards["b"] == [1.0, 1.0], "the task's own values are left alone"


def test_a_condition_on_length_reads_the_step_whatever_the_shape():
    shape = {"length_reward": "length", "length": LengthFall(10, 8)}
    shaping = Shaping(**shape, conditions={"a": RewardCondition("length", 1.0)})
    assert shaping.apply({"a": [1.0, 1.0], "length": [1.0, 0.0]}, [4, 8]) == {
        "a": [1.0, 0.0],
        "length": [0.75, 0.25],
    }


# Partial credit

WHOLE = {"a": [1.0, 0.0, 0.0, None], "b": [1.0, 1.0, 1.0, 1.0]}
SHARES = {"a": [1.0, 0.5, 0.0, None]}


@pytest.mark.parametrize(
    ("partial_credit", "share", "met"),
    [
        (False, 0.5, [1.0, 0.0, 0.0, None]),
        (False, 1.0, [1.0, 0.0, 0.0, None]),
        (True, 0.5, [1.0, 1.0, 0.0, None]),
        (True, 1.0, [1.0, 0.0, 0.0, None]),
    ],
)
def test_a_condition_reads_partial_credit_and_its_top_is_every_test(partial_credit, share, met):
    credited = {**WHOLE, **SHARES} if partial_credit else WHOLE
    assert Shaping(partial_credit).apply(WHOLE, [1] * 4, SHARES) == credited
    condition = RewardCondition("a", compute_threshold((0, 1), share))
    shaping = Shaping(partial_credit, conditions={"b": condition})
    assert shaping.apply(WHOLE, [1] * 4, SHARES) == {**credited, "b": met}


def test_partial_credit_exists_only_for_tasks_that_give_it(tmp_path):
    assert PARTIAL_CREDIT in list_parameters(TOY)
    info = dataclasses.replace(TOY, partial_reward=None)
    assert PARTIAL_CREDIT not in list_parameters(info)
    assert not build(build_trial_config("", tmp_path)).partial_credit
    assert build(build_trial_config("", tmp_path, partial_credit=True)).partial_credit


# Out of a trial's parameters


def shaped(tmp_path, rewards, lengths, **params):
    return build(build_trial_config("", tmp_path, **params)).apply(rewards, lengths)


REWARDS = {"hits": [8.0, 1.0, None], "vowels": [0.0, 2.0, 1.0], "length": [1.0, 0.0, None]}


def test_defaults_leave_every_value_as_it_was(tmp_path):
    result = shaped(tmp_path, REWARDS, [4, 6, 8])
    assert result == REWARDS
    assert all(result[name] is REWARDS[name] for name in REWARDS)


@cases("core", "shaping")
def test_parameters_reach_the_rewards(tmp_path, params, lengths, change):
    assert shaped(tmp_path, REWARDS, lengths, **params) == {**REWARDS, **change}


def test_a_ramp_without_room_to_fall_leaves_the_step(tmp_path):
    settings = SETTINGS.replace(length_limit=SETTINGS.max_completion_length)
    config = build_trial_config("", tmp_path, settings=settings, length_shape="ramp")
    assert build(config).apply(REWARDS, [4, 6, 8]) == REWARDS


def test_a_task_without_a_length_reward_has_no_length_shape(tmp_path):
    info = dataclasses.replace(TOY, length_reward=None)
    assert not set(LENGTH_PARAMETERS) & set(list_parameters(info))
    assert set(LENGTH_PARAMETERS) < set(list_parameters(TOY))
    config = build_trial_config("", tmp_path, length_shape="ramp")
    assert build(config, info).apply(REWARDS, [1, 1, 1]) == REWARDS


def test_one_reward_has_nothing_to_be_conditioned_on(tmp_path):
    info = dataclasses.replace(TOY, rewards={"hits": (0, 8)})
    assert "conditioning.hits" not in list_parameters(info)
    assert list_parameters(TOY)["conditioning.hits"].choices == (
        "none",
        "vowels",
        "length",
    )


def test_shaping_changes_training_rewards_and_no_metric(tmp_path):
    task = ToyTask(SETTINGS)
    problems = task.problems("train", 2, 0)
    shaping = build(build_trial_config("", tmp_path, length_shape="ramp"))
    ids = [[2] * 4, [2] * 6]
    batch = {"completions": ["aeta", "aetaet"], "completion_ids": ids, "problem": [0, 1]}
    plain = [reward(**batch) for reward in build_reward_functions(task, problems)]
    result = [reward(**batch) for reward in build_reward_functions(task, problems, shaping)]
    assert result[:2] == plain[:2]
    assert (plain[2], result[2]) == ([1.0, 0.0], [1.0, 0.5])
    scores = task.score(problems, batch["completions"], [4, 6])
    assert scores.metrics["length"] == [1.0, 0.0]
