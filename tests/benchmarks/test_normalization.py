"""What the normalization benchmark computes from its trainings, against closed forms."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from normalization import (
    BOXES,
    Plan,
    measure_distances,
    measure_seed_distances,
    read_results,
    render_markdown,
    train_all,
)
from normalization_trials import (
    MODES,
    RANGES,
    Result,
    Setting,
    bootstrap,
    build_goals,
    build_task_info,
    build_training,
    compute_attainment,
    compute_attainment_difference,
    compute_hypervolume,
    count_distinct,
    count_distinct_advantages,
    find_front,
    rescale,
)

from gdpo_tune.core.settings import SandboxSettings, TrainingSettings


def result_of(setting: Setting, test: tuple[float, float, float], plan: Plan) -> Result:
    values = dict(zip(("correctness", "format", "length"), test, strict=True))
    training = build_training(setting.task, plan.steps, plan.prompts)
    return Result(setting, training.model_dump(), values, values, dict.fromkeys(MODES, 2.0), 1.0)


def finish(plan: Plan, settings: list[Setting], better: float = 3e-4) -> None:
    """Results in which one learning rate is the better one, and weights trade off."""
    for setting in settings:
        level = 0.6 if setting.learning_rate == better else 0.5
        place = plan.weights.index(setting.weight) / len(plan.weights)
        test = (level - place / 2, 0.5, 0.1 + place + setting.seed / 100)
        plan.done[setting] = result_of(setting, test, plan)


# --- pure figures ---------------------------------------------------------------------------------


def test_values_within_the_tolerance_are_one():
    assert count_distinct([0.5, 0.0, 0.0004, -1.0, 0.5]) == 3
    assert count_distinct([1.0, 1.002]) == 2
    assert count_distinct([7.0] * 5) == 1
    assert count_distinct([]) == 0


def test_rewards_that_add_up_alike_collapse_under_grpo_alone():
    batch = {
        "correctness": [0.0] * 8,
        "format": [1.0, 0, 0, 0, 0, 0, 0, 0],
        "length": [0, 1.0, 1.0, 0, 0, 0, 0, 0],
    }
    counts = count_distinct_advantages([batch], [1.0, 1.0, 1.0])
    assert counts == {"gdpo": 3, "grpo": 2, "grpo_no_std": 2}
    unanimous = {name: [1.0] * 8 for name in batch}
    assert count_distinct_advantages([unanimous], [1.0, 1.0, 1.0]) == dict.fromkeys(MODES, 1)
    assert count_distinct_advantages([batch, unanimous], [1.0, 1.0, 1.0])["gdpo"] == 2


def test_a_reward_that_is_not_scored_stays_so_in_another_range():
    assert rescale([0.0, None, 1.0, 0.5], (0.0, 1.0), (-3.0, 3.0)) == [-3.0, None, 3.0, 0.0]
    assert rescale([-3.0, 1.5, None], (-3.0, 3.0), (0.0, 1.0)) == [0.0, 0.75, None]


def test_hypervolume_is_a_share_of_the_box():
    assert compute_hypervolume(np.array([[1.0, 1.0, 1.0]])) == 1.0
    assert compute_hypervolume(np.array([[0.5, 1.0], [1.0, 0.5]])) == pytest.approx(0.75)
    assert compute_hypervolume(np.array([[0.0, 1.0], [1.0, -0.2]])) == 0.0


def test_the_front_of_means():
    assert find_front(np.array([[0.2, 0.9], [0.5, 0.5], [0.4, 0.5]])).tolist() == [
        True,
        True,
        False,
    ]


def test_attainment_is_the_share_of_seeds_that_reach_a_goal():
    values = np.array([[[0.5, 0.5]], [[0.9, 0.2]]])
    wanted = np.array([[0.1, 0.1], [0.5, 0.5], [0.8, 0.3], [0.9, 0.2]])
    assert compute_attainment(values, wanted).tolist() == [1.0, 0.5, 0.0, 0.5]


def test_attainment_difference_of_two_boxes():
    square, tall = np.array([[[0.5, 0.5]]]), np.array([[[0.25, 1.0]]])
    assert compute_attainment_difference(square, tall) == pytest.approx((0.125, 0.125))
    assert compute_attainment_difference(square, square) == (0.0, 0.0)


def test_attainment_differs_by_the_difference_of_mean_hypervolumes():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 25, size=(2, 3, 5, 3)) / 24  # on the lines of the grid
    more, less = compute_attainment_difference(one, other)
    volumes = [np.mean([compute_hypervolume(seed) for seed in side]) for side in (one, other)]
    assert more > 0
    assert less > 0
    assert more - less == pytest.approx(volumes[0] - volumes[1])


def test_goals_are_the_middles_of_a_grid():
    assert build_goals(2, grid=2).tolist() == [
        [0.25, 0.25],
        [0.25, 0.75],
        [0.75, 0.25],
        [0.75, 0.75],
    ]


def test_bootstrap_of_a_mean():
    values = np.array([0.0, 1.0])
    interval = bootstrap(2, lambda seeds: float(values[seeds].mean()))
    assert (interval.low, interval.value, interval.high) == (0.0, 0.5, 1.0)
    many = np.random.default_rng(0).normal(size=100)
    wide = bootstrap(100, lambda seeds: float(many[seeds].mean()))
    expected = 1.96 * many.std() / 10
    assert wide.high - wide.value == pytest.approx(expected, rel=0.15)
    assert wide.value - wide.low == pytest.approx(expected, rel=0.15)
    alike = bootstrap(3, lambda seeds: 0.25)
    assert (alike.low, alike.value, alike.high) == (0.25, 0.25, 0.25)


# --- the plan and its file ------------------------------------------------------------------------


def test_the_learning_rate_is_that_of_the_greater_validation_hypervolume():
    plan = Plan(["math"])
    finish(plan, plan.list_pilot_settings())
    assert len(plan.list_pilot_settings()) == 3 * 2 * len(RANGES) * len(MODES)
    assert plan.choose_rate("math", "grpo") == 3e-4
    assert plan.choose_rate("tools", "grpo") is None
    finish(plan, plan.list_pilot_settings(), better=1.5e-4)
    assert plan.choose_rate("math", "grpo") == 1.5e-4


def test_every_setting_is_trained_with_the_same_budget_for_every_mode():
    plan = Plan(["math", "tools"])
    finish(plan, plan.list_pilot_settings())
    rest = plan.list_remaining_settings()
    assert len(set(rest)) == len(rest) == 2 * 3 * len(plan.weights) * len(RANGES) * len(MODES)
    for mode in MODES:
        chosen = {(s.task, s.ranges, s.weight, s.seed) for s in rest if s.mode == mode}
        assert len(chosen) == len(rest) / len(MODES)


def test_a_learning_rate_that_was_not_tried_in_full_is_not_chosen():
    plan = Plan(["math"])
    finish(plan, plan.list_pilot_settings())
    missing = Setting("math", "mixed", "grpo", plan.pilot_weights[1], 3e-4, 0)
    del plan.done[missing]
    assert plan.choose_rate("math", "grpo") == 1.5e-4
    assert Plan(["math"], learning_rates=[3e-4], done=plan.done).choose_rate("math", "grpo") is None


def test_only_weights_without_a_gap_are_reported():
    plan = Plan(["math"])
    assert plan.build_cells() == []
    finish(plan, plan.list_pilot_settings())
    assert plan.build_cells() == []
    rest = plan.list_remaining_settings()
    finish(plan, rest[:-1])
    gap = rest[-1].weight
    cells = plan.build_cells()
    assert len(cells) == len(RANGES) * len(MODES)
    assert cells[0].weights == tuple(weight for weight in plan.weights if weight != gap)
    assert cells[0].values.shape == (3, 4, 3)
    finish(plan, rest)
    assert plan.build_cells()[0].weights == plan.weights


def test_a_line_that_was_cut_off_is_trained_again(tmp_path: Path):
    kept, plan = tmp_path / "trainings.jsonl", Plan(["math"])
    first, second, *_ = plan.list_pilot_settings()
    whole = json.dumps(asdict(result_of(first, (0.5, 0.5, 0.5), plan)))
    other = json.dumps(asdict(result_of(second, (0.5, 0.5, 0.5), Plan(["math"], steps=7))))
    kept.write_text(f"{whole}\n{other}\n{whole[:50]}")
    read_results(kept, plan)
    assert list(plan.done) == [first]  # the second one was trained for another number of steps
    assert kept.read_text() == f"{whole}\n{other}\n"
    train_all([first], plan, 1, kept)
    assert kept.read_text() == f"{whole}\n{other}\n"


def test_settings_of_equal_weights_or_scales_are_compared():
    plan = Plan(["math"])
    low, middle, high = plan.pilot_weights
    pairs = {
        Setting("math", "mixed", "grpo", middle, 3e-4, 0): (0.5, 0.5, 0.5),
        Setting("math", "equal", "grpo", low, 3e-4, 0): (0.5, 0.5, 0.8),
        Setting("math", "equal", "grpo", middle, 3e-4, 0): (0.0, 0.0, 0.0),
        Setting("math", "mixed", "grpo", high, 3e-4, 1): (0.5, 0.5, 0.5),
    }
    results = [result_of(setting, test, plan) for setting, test in pairs.items()]
    assert measure_distances(results, 6) == {("math", "grpo"): pytest.approx(0.1)}
    assert measure_distances(results, 1) == {("math", "grpo"): pytest.approx(0.5)}


def test_seeds_of_one_setting_are_compared_in_pairs():
    plan = Plan(["math"])
    setting = plan.list_pilot_settings()[0]
    values = [(0.5, 0.5, 0.5), (0.5, 0.5, 0.8), (0.5, 0.5, 0.2)]
    seeds = [replace(setting, seed=seed) for seed in range(3)]
    results = [result_of(one, test, plan) for one, test in zip(seeds, values, strict=True)]
    alone = result_of(replace(setting, mode="saw"), values[0], plan)
    assert measure_seed_distances([*results, alone]) == {
        ("math", setting.mode): pytest.approx(0.4 / 3)
    }


def test_the_tables_name_every_cell():
    plan = Plan(["tools"])
    finish(plan, plan.list_pilot_settings())
    finish(plan, plan.list_remaining_settings())
    text = render_markdown(plan.build_cells(), plan.done.values())
    for ranges in RANGES:
        for mode in MODES:
            assert f"| {ranges} | {mode} | 0.0003 | 5 of 5 |" in text
    assert "| grpo: mixed against equal | 0.000 [0.000, 0.000] | 0.000 | 0.000 |" in text


# --- tasks whose correctness has a range of our choice --------------------------------------------


@pytest.mark.parametrize(("name", "tag"), [("math", "answer"), ("tools", "tool_call")])
def test_both_forms_hold_out_the_same(name: str, tag: str):
    scores = {}
    for ranges, (low, high) in RANGES.items():
        info = build_task_info(name, ranges)
        assert info.rewards["correctness"] == (low, high)
        with info.build(TrainingSettings(), SandboxSettings()) as task:
            problems = task.problems("train", 4, 0)
            solutions = [problem.data["solution"] for problem in problems]
            right = [f"<think></think>\n<{tag}>\n{one}\n</{tag}>" for one in solutions]
            texts = [*right[:2], "nothing", "<think></think>"]
            scores[ranges] = task.score(problems, texts, [9, 99, 9, 99])
        assert scores[ranges].rewards["correctness"] == [high, high, low, low]
    assert scores["equal"].metrics == scores["mixed"].metrics
    assert scores["equal"].rewards["length"] == scores["mixed"].rewards["length"]
    assert list(BOXES[name]) == ["correctness", "format", "length"]
