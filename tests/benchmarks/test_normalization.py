"""What the experiment on normalization computes from its trainings, against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from normalization import (
    GOALS,
    MODES,
    RANGES,
    WEIGHTS,
    Plan,
    bootstrap,
    build_cells,
    build_table,
    build_task_info,
    choose_rates,
    compute_attainment,
    compute_attainment_difference,
    count_distinct_advantages,
    measure_distances,
    measure_seed_distances,
    render_task,
    rescale,
)

from gdpo_tune.analysis.pareto import compute_hypervolume
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings

PLAN = Plan(["tools"], seeds=2)


def build_result(job: dict[str, Any], better: float = 3e-4) -> dict[str, Any]:
    """A training in which one learning rate is the better one, and weights trade off."""
    level = 0.6 if job["learning_rate"] == better else 0.5
    place = WEIGHTS.index(job["weight"]) / len(WEIGHTS)
    values = {"correctness": 3 * (level - place / 2), "format": 0.5, "length": 0.1 + place}
    distinct = dict.fromkeys(MODES, 2.0)
    return {"validation": values, "test": values, "distinct": distinct, "cpu_seconds": 1.0}


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


def test_attainment_is_the_share_of_seeds_that_reach_a_goal():
    values = np.array([[[0.5, 0.5]], [[0.9, 0.2]]])
    wanted = np.array([[0.1, 0.1], [0.5, 0.5], [0.8, 0.3], [0.9, 0.2]])
    assert compute_attainment(values, wanted).tolist() == [1.0, 0.5, 0.0, 0.5]
    square, tall = np.array([[[0.5, 0.5]]]), np.array([[[0.25, 1.0]]])
    assert compute_attainment_difference(square, tall) == pytest.approx((0.125, 0.125))


def test_attainment_differs_by_the_difference_of_mean_hypervolumes():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 25, size=(2, 3, 5, 3)) / 24  # on the lines of the grid
    more, less = compute_attainment_difference(one, other)
    volumes = [
        np.mean([compute_hypervolume(seed, GOALS) for seed in side]) for side in (one, other)
    ]
    assert min(more, less) > 0
    assert more - less == pytest.approx(volumes[0] - volumes[1])


def test_bootstrap_of_a_mean():
    values = np.array([0.0, 1.0])
    assert bootstrap(2, lambda seeds: float(values[seeds].mean())) == "0.500 [0.000, 1.000]"
    assert bootstrap(3, lambda seeds: 0.25) == "0.250 [0.250, 0.250]"


@pytest.mark.parametrize("better", [3e-4, 1.5e-4])
def test_the_learning_rate_is_that_of_the_greater_validation_hypervolume(better: float):
    jobs = PLAN.list_pilot_jobs()
    assert len(jobs) == 3 * 2 * len(RANGES) * len(MODES)
    table = build_table(jobs, [build_result(job, better) for job in jobs])
    assert choose_rates(table, PLAN) == {("tools", mode): better for mode in MODES}


def test_every_mode_has_the_same_trainings_and_the_tables_name_every_cell():
    rates = {("tools", mode): 3e-4 for mode in MODES}
    jobs = PLAN.list_further_jobs(rates)
    assert len(jobs) == 2 * len(WEIGHTS) * len(RANGES) * len(MODES)
    table = build_table(jobs * 2, [build_result(job) for job in jobs] * 2)
    assert len(table) == len(jobs), "a pilot that is among the others counts once"
    cells = build_cells(table, PLAN, rates)
    assert cells[0].values.shape == (2, 5, 3)
    assert cells[0].means[0].tolist() == pytest.approx([1.8, 0.5, 0.1])
    text = render_task(cells, table)
    for ranges in RANGES:
        for mode in MODES:
            assert f"| {ranges} | {mode} | 0.0003 | 5 of 5 |" in text
    assert "| grpo: mixed against equal | 0.000 [0.000, 0.000] | 0.000 | 0.000 |" in text


def test_settings_of_equal_weights_or_scales_and_seeds_of_one_setting_are_compared():
    low, middle, high = PLAN.pilot_weights
    rows = [
        ("mixed", middle, 0, (0.5, 0.5, 0.5)),
        ("equal", low, 0, (0.5, 0.5, 0.8)),
        ("equal", middle, 0, (0.0, 0.0, 0.0)),
        ("mixed", high, 1, (0.5, 0.5, 0.5)),
        ("mixed", high, 0, (0.5, 0.5, 0.8)),
    ]
    table = pd.DataFrame(
        {"task": "math", "mode": "grpo", "learning_rate": 3e-4, "ranges": ranges, "seed": seed}
        | {"weight": weight, **dict(zip(("correctness", "format", "length"), values, strict=True))}
        for ranges, weight, seed, values in rows
    )
    key = ("math", "grpo")
    # at six times the scale: `middle` and `low`; at the same weight: `middle` alone
    assert measure_distances(table, 6)[key] == pytest.approx((0.1 + 0.6) / 2)
    assert measure_distances(table, 1)[key] == pytest.approx(0.5)
    assert measure_seed_distances(table)[key] == pytest.approx(0.1)


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
