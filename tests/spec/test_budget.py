"""A budget that `halving` divides: which files mean it, and the configurations of its wide rung."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Cost, Rung, TrialRecord
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.first_trials import (
    EVALUATED,
    FROM_MODEL,
    TRAININGS_PER_CHOICE,
    UNKNOWN_BUDGET,
    count_least_wide,
    count_wide,
    divide_budget,
    draw_startup_point,
    find_wide_step,
    list_startup_choices,
    map_share,
)
from gdpo_tune.spec.model import FULL_TRAININGS
from gdpo_tune.spec.space import Choices, Uniform
from tests.support.paths import ROOT

SPACE = """
  normalization: [gdpo, grpo, grpo_no_std]
  group_size: [4, 8]
  reward_weights: {correctness: 1, format: {log: [0.05, 2]}, length: {log: [0.05, 2]}}
  learning_rate: {log: [3.0e-5, 3.0e-4]}
"""
SMALL_SPACE = """
  learning_rate: {log: [3.0e-5, 3.0e-4]}
  reward_weights: {correctness: 1, format: {log: [0.1, 2]}, length: 1}
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


@pytest.fixture
def load(tmp_path):
    """Load a file with a section `search:` and overrides."""

    def load(search="budget: {completions: 89600}", *overrides, space=SPACE):
        file = tmp_path / "sweep.yaml"
        file.write_text(FILE.format(space=space, search=search, storage=tmp_path))
        return load_spec(file, overrides)

    return load


@pytest.fixture
def load_small(load):
    return lambda search, *overrides: load(search, *overrides, space=SMALL_SPACE)


@pytest.mark.parametrize(
    ("search", "scheduler", "trials"),
    [
        ("", "fifo", 16),
        ("trials: 8", "fifo", 8),
        ("trials: 8, budget: {completions: 64000}", "fifo", 8),
        ("budget: {completions: 64000}", "halving", 0),
        ("trials: 0, budget: {completions: 64000}", "halving", 0),
        ("budget: {hours: 2}", "halving", 0),
        ("budget: {trials: 8}", "fifo", 16),
        ("scheduler: {type: fifo}, budget: {completions: 64000}", "fifo", 16),
        ("scheduler: {type: halving}, trials: 8, budget: {completions: 64000}", "halving", 8),
    ],
)
def test_a_budget_without_trials_is_divided(load_small, search, scheduler, trials):
    found = load_small(search).search
    assert (found.scheduler.type, found.trials) == (scheduler, trials)
    assert found.is_divided == (scheduler == "halving")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 200),  # 1,000 steps of 64 / 5
        (["training.completions_per_step=128"], 100),
        (["training.steps=40"], 40),
        (["search.budget.completions=128000"], 400),
        (["search.replicates.max_runs=4"], 111),  # / (5 + 4)
    ],
)
def test_one_training_takes_a_fifth_unless_the_file_says_so(load_small, overrides, steps):
    assert FULL_TRAININGS == 5
    alone = "replicates: {max_runs: 0}, budget: {completions: 64000}"
    assert load_small(alone, *overrides).training.steps == steps


def test_replicates_have_their_part_of_the_budget(load_small):
    spec = load_small("budget: {completions: 64000}")
    assert spec.search.replicates.max_trainings == 4
    assert spec.search_completions == 64000 - 4 * 111 * 64
    none = load_small("replicates: {per_point: 0}, budget: {completions: 64000}")
    assert (none.search_completions, none.training.steps) == (64000, 200)
    assert load_small("budget: {hours: 2}").search_completions == 0


def test_a_larger_budget_is_the_same_sweep(load_small, tmp_path):
    small = load_small("budget: {completions: 64000}")
    large = load_small("budget: {completions: 128000}")
    assert small.compute_identity() == large.compute_identity()
    fixed = load_small("trials: 8", "training.steps=250")
    assert small.compute_identity() != fixed.compute_identity()
    (tmp_path / "stored.yaml").write_text(small.dump_yaml())
    assert load_spec(tmp_path / "stored.yaml") == small


def list_begun(spec):
    """List the complete first points of the wide rung, the published setting and `enqueue:`."""
    published = load_task_info(spec.task, spec.space.domains).published
    count = len(list_startup_choices(spec))
    drawn = [spec.space.complete(draw_startup_point(spec, index)) for index in range(count)]
    return [spec.space.complete_baseline(published), *spec.enqueue, *drawn]


def count_beginnings(spec):
    """Count how often each choice begins where it has an effect."""
    return Counter(
        (name, point[name])
        for point in list_begun(spec)
        for name in spec.space.select_active(point)
        if name in point and isinstance(spec.space.searched_domains.get(name), Choices)
    )


def list_choices(spec):
    domains = spec.space.searched_domains.items()
    return [(n, value) for n, d in domains if isinstance(d, Choices) for value in d.choices]


@pytest.mark.parametrize("merges", [0, 40])
def test_each_choice_begins_twice(load, merges):
    spec = load("budget: {completions: 89600}", f"search.merges.budget={merges}")
    begun = count_beginnings(spec)
    assert {choice: begun[choice] for choice in list_choices(spec)} == begun
    assert min(begun.values()) >= TRAININGS_PER_CHOICE
    assert len(list_startup_choices(spec)) == (8 if merges else 5), "the corners, and no more"


def test_choices_of_two_dimensions_meet_evenly(load):
    points = list_startup_choices(load())
    met = Counter((p["normalization"], p["group_size"]) for p in points)
    assert len(met) == 6, "every mode with every group size"


def test_a_choice_counts_only_where_it_has_an_effect(load):
    shape = "  length_shape: {choices: [step, overlong], when: {normalization: grpo}}\n"
    begun = count_beginnings(load(space=SPACE + shape))
    assert min(begun["length_shape", v] for v in ("step", "overlong")) >= TRAININGS_PER_CHOICE
    assert begun["normalization", "grpo"] >= 2 * TRAININGS_PER_CHOICE, "each with one of two values"


def test_what_is_enqueued_counts(load):
    points = ["{normalization: grpo, group_size: 8}", "{normalization: grpo_no_std}"] * 2
    spec = load("budget: {completions: 89600}", f"enqueue=[{', '.join(points)}]")
    assert len(list_startup_choices(spec)) < len(list_startup_choices(load()))
    begun = count_beginnings(spec)
    assert min(begun[choice] for choice in list_choices(spec)) >= TRAININGS_PER_CHOICE
    assert count_least_wide(spec) == 2 + len(list_startup_choices(spec)), "a point trains once"


def test_a_space_of_one_point_begins_it_once(load):
    weights = "reward_weights: {correctness: 1, format: 1, length: 1}"
    spec = load(space=f"\n  normalization: gdpo\n  {weights}\n")
    assert (list_startup_choices(spec), count_least_wide(spec)) == ((), 1)


def test_the_points_do_not_depend_on_the_budget(load):
    small, large = (
        [draw_startup_point(spec, index) for index in range(8)]
        for spec in (load(), load("budget: {completions: 640000}"))
    )
    assert small == large
    assert len({tuple(point.items()) for point in small}) == 8


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        (Choices(choices=("a", "b", "c")), {0: "a", 0.33: "a", 0.34: "b", 0.67: "c", 1: "c"}),
        (Uniform(low=2, high=8, step=3, integer=True), {0: 2, 0.34: 5, 1: 8}),
        (Uniform(low=1.0, high=3.0), {0: 1.0, 0.25: 1.5, 1: 3.0}),
        (Uniform(low=0.01, high=1.0, log=True), {0: 0.01, 0.5: 0.1, 1: 1.0}),
        # Each integer owns its rounding range: from 1.5 to 4.5, on a log scale; 2.5 lies at the
        # share ln(2.5 / 1.5) / ln 3 = 0.465, and 3.5 at 0.771.
        (Uniform(low=2, high=4, log=True, integer=True),
         {0: 2, 0.464: 2, 0.466: 3, 0.770: 3, 0.772: 4, 1: 4}),
    ],
)  # fmt: skip
def test_a_share_of_a_domain(domain, expected):
    found = {share: map_share(domain, share) for share in expected}
    assert found == pytest.approx(expected) if isinstance(found[0], float) else found == expected


def list_counts(load, budgets):
    specs = [load(f"budget: {{completions: {each}}}") for each in budgets]
    return [(count_wide(spec), find_wide_step(spec)) for spec in specs]


def test_a_larger_budget_begins_more_and_then_trains_them_longer(load):
    found = list_counts(load, [30_000, 89_600, 200_000, 400_000, 10**6, 4 * 10**6])
    assert found == sorted(found)
    least, most = count_least_wide(load()), 12  # 8 and 4 of the model; 6 effects
    assert [count for count, _ in found] == [least, *[most] * 5]
    assert all(later > step for (_, step), (_, later) in pairwise(found))
    assert most == max(least + FROM_MODEL, 2 * 6)


@pytest.mark.parametrize("budget", [30_000, 89_600, 10**6])
def test_the_wide_rung_takes_its_share_of_the_budget(load, budget):
    spec = load(f"budget: {{completions: {budget}}}")
    wide = (count_wide(spec) + 1) * find_wide_step(spec)
    share = spec.search.scheduler.wide_share * spec.search_completions / 64
    assert share - count_wide(spec) - 1 < wide <= share


def test_between_the_two_rungs_are_as_long_as_their_evaluations_allow(load):
    counts = list_counts(load, range(30_000, 89_600, 4000))
    between = [(count, step) for count, step in counts if 8 < count < 12]
    evaluated = load().training.validation_completions
    assert between
    assert all(evaluated <= EVALUATED * 64 * (step + 1) for _, step in between)


def test_trials_decide_how_many_begin(load):
    budget = "budget: {completions: 89600}, scheduler: {type: halving}"
    assert count_wide(load(f"trials: 30, {budget}")) == 30


def build_published(step, seconds):
    rung = Rung(step, {}, Cost(completions=64 * step, seconds=seconds))
    options = {"rungs": (rung,), "paused_at": rung.completions}
    return TrialRecord(1, "published", "baseline", {}, 0, "paused", **options)


@pytest.mark.parametrize(
    ("budget", "resources"),
    [("hours: 2", "{}"), ("gpu_hours: 2", "{gpus: 1}"), ("gpu_hours: 8", "{gpus: 1, workers: 4}")],
)
def test_of_hours_the_first_rung_tells_how_many_they_pay_for(load, budget, resources):
    spec = load(f"budget: {{{budget}}}", f"resources={resources}")
    assert count_wide(spec) == 12, "nothing is known yet"
    step = find_wide_step(spec)
    assert step == spec.training.steps // UNKNOWN_BUDGET
    least = count_least_wide(spec)
    for seconds, expected in ((100, 12), (170, int(0.25 * 7200 / 170) - 1), (1000, least)):
        assert count_wide(spec, [build_published(step, seconds)]) == expected


def test_the_wide_rung_stays_where_the_first_one_was_recorded(load):
    spec = load("budget: {completions: 10000000}")
    assert find_wide_step(spec) > 7
    assert find_wide_step(spec, [build_published(7, 1)]) == 7


@pytest.mark.parametrize(
    ("share", "steps", "longest", "long", "end"),
    [
        # Of 1,000 steps, 8 trainings to step 31 take 248; of the 752 that are left each training
        # beyond gets 200 - 31 at most, and 752 // 169 = 4; or 150 - 31, and 752 // 119 = 6.
        (0.25, 1000, 200, 4, 200),
        (0.25, 1000, 150, 6, 150),
        # To step 124 they take 992, and each of four long ones gets 2 of the 8 that are left.
        (0.9999, 1000, 200, 4, 126),
        # To step 125 they take 1,000: one step is left, and a long training has a step of its own.
        (0.9999, 1001, 200, 4, 126),
    ],
)
def test_long_trainings_share_what_the_wide_rung_leaves(
    load_small, share, steps, longest, long, end
):
    scheduler = f"scheduler: {{type: halving, wide_share: {share}}}"
    budget = f"budget: {{completions: {64 * steps}}}"
    search = f"replicates: {{max_runs: 0}}, {scheduler}, {budget}"
    spec = load_small(search, f"training.steps={longest}")
    assert divide_budget(spec, count_wide(spec) + 1) == (long, end)


def test_trainings_that_are_new_or_have_ended_count_among_the_long_ones(load_small):
    search = "replicates: {max_runs: 0}, budget: {completions: 64000}"
    spec = load_small(search, "training.steps=150")
    # As above, but two of the six begin anew: (752 + 4 * 31) // 6.
    assert divide_budget(spec, 8, 2) == (6, 146)
    # 3 to step 31 leave 907 steps: for 4 long trainings, however few were measured.
    longer = load_small(search, "training.steps=400")
    assert divide_budget(longer, 3, 1) == (4, (907 + 3 * 31) // 4)
    # An extended budget adds trainings of the length of what has ended; others still wait.
    rungs = tuple(Rung(step, {}, Cost(completions=64 * step)) for step in (31, 90))
    ended = TrialRecord(2, "search", "complete", {}, 0, "model", rungs=rungs)
    waits = build_published(31, 1)
    assert divide_budget(spec, 8, 0, [waits, ended]) == (6, 90)
    assert divide_budget(spec, 8, 0, [waits]) == (6, 150)


def read_problem(load, search, *overrides):
    with pytest.raises(SpecError) as caught:
        load(search, *overrides)
    (problem,) = caught.value.problems
    return problem.key, problem.reason, problem.fix


def test_too_small_a_budget_names_what_takes_it(load):
    plain = "replicates: {max_runs: 0}, budget: "
    key, reason, fix = read_problem(load, plain + "{completions: 3000}")
    assert key == "search.budget.completions"
    assert "the wide rung of 9 trainings may take 0.25 of them, 2 or more each" in reason
    assert "each choice needs 2 trainings, and normalization has 3 choices" in reason
    assert "or fix space.normalization at one value" in fix
    enough = int(fix.split()[1])
    assert find_wide_step(load(f"{plain}{{completions: {enough}}}")) == 2
    assert count_wide(load(f"{plain}{{completions: 3000}}", "space.normalization=gdpo")) == 4
    _, _, fix = read_problem(load, "budget: {completions: 3000}")  # with replicates
    assert find_wide_step(load(f"budget: {{completions: {fix.split()[1]}}}")) >= 2


def test_fewer_trials_than_the_wide_rung_needs_are_refused(load):
    search = "scheduler: {type: halving}, budget: {completions: 89600}, trials: "
    key, reason, fix = read_problem(load, f"{search}7")
    assert key == "search.trials"
    assert reason.startswith("the wide rung needs 8 configurations: each choice needs 2 trainings")
    assert fix == "write 8 or more, or remove the key; or search fewer choices"
    assert count_wide(load(f"{search}8")) == 8


def test_the_shipped_file_begins_what_its_budget_is_made_for():
    spec = load_spec(ROOT / "search_spaces" / "code.yaml")
    assert (count_wide(spec), find_wide_step(spec)) == (12, 19)
