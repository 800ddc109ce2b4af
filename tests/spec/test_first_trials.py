"""The configurations of the wide rung: how many, which ones, and how long they train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Cost, Params, Rung, TrialRecord
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.first_trials import (
    EVALUATED,
    FROM_MODEL,
    TRAININGS_PER_CHOICE,
    UNKNOWN_BUDGET,
    count_least_wide,
    count_wide,
    draw_startup_point,
    find_wide_step,
    list_startup_choices,
)
from gdpo_tune.spec.space import Choices
from tests.support.paths import ROOT

SPACE = """
  normalization: [gdpo, grpo, grpo_no_std]
  group_size: [4, 8]
  reward_weights: {correctness: 1, format: {log: [0.05, 2]}, length: {log: [0.05, 2]}}
  learning_rate: {log: [3.0e-5, 3.0e-4]}
"""
FILE = """
task: code
policy: embedded
objectives:
  correctness: {{direction: maximize, reference: 0}}
  format: {{direction: maximize, reference: 0}}
space:{space}
search: {{{search}}}
storage: {storage}
"""


def load(
    directory: Path,
    search: str = "budget: {completions: 89600}",
    *overrides: str,
    space: str = SPACE,
) -> SweepSpec:
    file = directory / "sweep.yaml"
    file.write_text(FILE.format(space=space, search=search, storage=directory))
    return load_spec(file, overrides)


def list_begun(spec: SweepSpec) -> list[Params]:
    """List the complete first points of the wide rung, the published setting and `enqueue:`."""
    published = load_task_info(spec.task, spec.space.domains).published
    count = len(list_startup_choices(spec))
    drawn = [spec.space.complete(draw_startup_point(spec, index)) for index in range(count)]
    return [spec.space.complete_baseline(published), *spec.enqueue, *drawn]


def count_beginnings(spec: SweepSpec) -> Counter[tuple[str, object]]:
    """Count how often each choice begins where it has an effect."""
    return Counter(
        (name, point[name])
        for point in list_begun(spec)
        for name in spec.space.select_active(point)
        if name in point and isinstance(spec.space.searched_domains.get(name), Choices)
    )


def list_choices(spec: SweepSpec) -> list[tuple[str, object]]:
    domains = spec.space.searched_domains.items()
    return [(n, value) for n, d in domains if isinstance(d, Choices) for value in d.choices]


def build_published(step: int, seconds: float) -> TrialRecord:
    cost = Cost(completions=64 * step, seconds=seconds)
    rung = Rung(step, {}, cost)
    return TrialRecord(
        1, "published", "baseline", {}, 0, "paused", rungs=(rung,), paused_at=rung.completions
    )


@pytest.mark.parametrize("merges", [0, 40])
def test_each_choice_begins_twice(tmp_path: Path, merges: int):
    spec = load(tmp_path, "budget: {completions: 89600}", f"search.merges.budget={merges}")
    begun = count_beginnings(spec)
    assert {choice: begun[choice] for choice in list_choices(spec)} == begun
    assert min(begun.values()) >= TRAININGS_PER_CHOICE
    assert len(list_startup_choices(spec)) == (8 if merges else 5), "the corners, and no more"


def test_choices_of_two_dimensions_meet_evenly(tmp_path: Path):
    points = list_startup_choices(load(tmp_path))
    met = Counter((p["normalization"], p["group_size"]) for p in points)
    assert len(met) == 6, "every mode with every group size"


def test_a_choice_counts_only_where_it_has_an_effect(tmp_path: Path):
    space = SPACE + "  length_shape: {choices: [step, overlong], when: {normalization: grpo}}\n"
    spec = load(tmp_path, space=space)
    begun = count_beginnings(spec)
    assert (
        min(begun["length_shape", value] for value in ("step", "overlong")) >= TRAININGS_PER_CHOICE
    )
    assert begun["normalization", "grpo"] >= 2 * TRAININGS_PER_CHOICE, "each with one of two values"


def test_what_is_enqueued_counts(tmp_path: Path):
    plain = load(tmp_path)
    points = ["{normalization: grpo, group_size: 8}", "{normalization: grpo_no_std}"]
    spec = load(tmp_path, "budget: {completions: 89600}", f"enqueue=[{', '.join(points * 2)}]")
    assert len(list_startup_choices(spec)) < len(list_startup_choices(plain))
    assert (
        min(count_beginnings(spec)[choice] for choice in list_choices(spec)) >= TRAININGS_PER_CHOICE
    )
    assert count_least_wide(spec) == 2 + len(list_startup_choices(spec)), "a point trains once"


def test_a_space_of_one_point_begins_it_once(tmp_path: Path):
    space = "\n  normalization: gdpo\n  reward_weights: {correctness: 1, format: 1, length: 1}\n"
    spec = load(tmp_path, space=space)
    assert list_startup_choices(spec) == ()
    assert count_least_wide(spec) == 1


def test_the_points_do_not_depend_on_the_budget(tmp_path: Path):
    small, large = (
        [draw_startup_point(spec, index) for index in range(8)]
        for spec in (load(tmp_path), load(tmp_path, "budget: {completions: 640000}"))
    )
    assert small == large
    assert len({tuple(point.items()) for point in small}) == 8


def list_counts(directory: Path, budgets: Sequence[int]) -> list[tuple[int, int]]:
    specs = [load(directory, f"budget: {{completions: {each}}}") for each in budgets]
    return [(count_wide(spec), find_wide_step(spec)) for spec in specs]


def test_a_larger_budget_begins_more_and_then_trains_them_longer(tmp_path: Path):
    budgets = [30_000, 89_600, 200_000, 400_000, 10**6, 4 * 10**6]
    found = list_counts(tmp_path, budgets)
    assert found == sorted(found)
    least, most = count_least_wide(load(tmp_path)), 12  # 8 and 4 of the model; 6 effects
    assert [count for count, _ in found] == [least, *[most] * 5]
    assert all(later > step for (_, step), (_, later) in pairwise(found))
    assert most == max(least + FROM_MODEL, 2 * 6)


@pytest.mark.parametrize("budget", [30_000, 89_600, 10**6])
def test_the_wide_rung_takes_its_share_of_the_budget(tmp_path: Path, budget: int):
    spec = load(tmp_path, f"budget: {{completions: {budget}}}")
    wide = (count_wide(spec) + 1) * find_wide_step(spec)
    share = spec.search.scheduler.wide_share * spec.search_completions / 64
    assert share - count_wide(spec) - 1 < wide <= share


def test_between_the_two_rungs_are_as_long_as_their_evaluations_allow(tmp_path: Path):
    counts = list_counts(tmp_path, range(30_000, 89_600, 4000))
    between = [(count, step) for count, step in counts if 8 < count < 12]
    evaluated = load(tmp_path).training.validation_completions
    assert between
    assert all(evaluated <= EVALUATED * 64 * (step + 1) for _, step in between)


def test_trials_decide_how_many_begin(tmp_path: Path):
    budget = "budget: {completions: 89600}, scheduler: {type: halving}"
    assert count_wide(load(tmp_path, f"trials: 30, {budget}")) == 30


@pytest.mark.parametrize(
    ("budget", "resources"),
    [("hours: 2", "{}"), ("gpu_hours: 2", "{gpus: 1}"), ("gpu_hours: 8", "{gpus: 1, workers: 4}")],
)
def test_of_hours_the_first_rung_tells_how_many_they_pay_for(
    tmp_path: Path, budget: str, resources: str
):
    spec = load(tmp_path, f"budget: {{{budget}}}", f"resources={resources}")
    assert count_wide(spec) == 12, "nothing is known yet"
    step = find_wide_step(spec)
    assert step == spec.training.steps // UNKNOWN_BUDGET
    least = count_least_wide(spec)
    for seconds, expected in ((100, 12), (170, int(0.25 * 7200 / 170) - 1), (1000, least)):
        assert count_wide(spec, [build_published(step, seconds)]) == expected


def test_the_wide_rung_stays_where_the_first_one_was_recorded(tmp_path: Path):
    spec = load(tmp_path, "budget: {completions: 10000000}")
    assert find_wide_step(spec) > 7
    assert find_wide_step(spec, [build_published(7, 1)]) == 7


def read_problem(directory: Path, search: str, *overrides: str) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        load(directory, search, *overrides)
    (problem,) = caught.value.problems
    return problem.key, problem.reason, problem.fix


def test_too_small_a_budget_names_what_takes_it(tmp_path: Path):
    plain = "replicates: {max_runs: 0}, budget: "
    key, reason, fix = read_problem(tmp_path, plain + "{completions: 3000}")
    assert key == "search.budget.completions"
    assert "the wide rung of 9 trainings may take 0.25 of them, 2 or more each" in reason
    assert "each choice needs 2 trainings, and normalization has 3 choices" in reason
    assert "or fix space.normalization at one value" in fix
    enough = fix.split()[1]
    assert find_wide_step(load(tmp_path, f"{plain}{{completions: {enough}}}")) == 2
    fixed = load(tmp_path, f"{plain}{{completions: 3000}}", "space.normalization=gdpo")
    assert count_wide(fixed) == 4


def test_a_budget_with_replicates_says_how_large_it_has_to_be(tmp_path: Path):
    _, _, fix = read_problem(tmp_path, "budget: {completions: 3000}")
    enough = fix.split()[1]
    assert find_wide_step(load(tmp_path, f"budget: {{completions: {enough}}}")) >= 2


def test_fewer_trials_than_the_wide_rung_needs_are_refused(tmp_path: Path):
    search = "scheduler: {type: halving}, budget: {completions: 89600}, trials: "
    key, reason, fix = read_problem(tmp_path, f"{search}7")
    assert key == "search.trials"
    assert reason.startswith("the wide rung needs 8 configurations: each choice needs 2 trainings")
    assert fix == "write 8 or more, or remove the key; or search fewer choices"
    assert count_wide(load(tmp_path, f"{search}8")) == 8


def test_the_shipped_file_begins_what_its_budget_is_made_for():
    spec = load_spec(ROOT / "search_spaces" / "code.yaml")
    assert (count_wide(spec), find_wide_step(spec)) == (12, 19)
