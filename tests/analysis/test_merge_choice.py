"""Which merge and which checkpoint is evaluated next: those that add most hypervolume."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.analysis.merge_choice import (
    choose_checkpoint,
    choose_merge,
    compute_expected_gains,
    list_merge_parents,
    predict_losses,
    rank_checkpoints,
    read_merges,
)
from gdpo_tune.analysis.pareto import compute_loss_hypervolume
from gdpo_tune.core.trials import Cost, Estimate, Objective, Part, Rung, check_part_weights
from tests.support.analysis import GOALS, build_checkpoint, build_trial

LINE = ((0.1, 0.9), (0.5, 0.5), (0.9, 0.1))


def build_parent(number, a, b, **fields):
    trial = build_trial(number, a, b, **fields)
    rungs = (Rung(60, trial.validation, Cost()),)
    return replace(trial, rungs=rungs, checkpoint=Path("checkpoint-60"), finished=None)


def build_merge(number, parts, a=0.0, b=0.0, state="complete", **fields):
    parts = tuple(Part(trial, 60, weight) for trial, weight in parts)
    merge = build_trial(number, a, b, role="merge", state=state, parts=parts, **fields)
    return merge if state == "complete" else replace(merge, validation={}, test={}, feasible=None)


def build_parents(points, first=0):
    return [build_parent(first + n, *point) for n, point in enumerate(points)]


def get_mixture(parts):
    return {part.trial: part.weight for part in parts}


POINTS = st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)), min_size=2, max_size=6)


@settings(max_examples=25, deadline=None)
@given(POINTS, st.integers(2, 4), st.sampled_from(["complete", "running", "failed", "pruned"]))
def test_merges_are_new_and_their_weights_sum_to_1(points, most_parts, state):
    records = build_parents(points)
    tried = set()
    for number in range(100, 108):
        parts = choose_merge(records, GOALS, most_parts)
        if parts is None:
            return
        assert 2 <= len(parts) <= most_parts
        assert all(part.step == 60 and part.weight > 0 for part in parts)
        assert parts == tuple(sorted(parts, key=lambda part: part.trial))
        check_part_weights([part.weight for part in parts])
        assert parts not in tried
        tried.add(parts)
        mixture = get_mixture(parts)
        a, b = (sum(w * points[n][axis] for n, w in mixture.items()) for axis in (0, 1))
        records.append(build_merge(number, list(mixture.items()), a + 0.02, b + 0.02, state))


@settings(max_examples=25, deadline=None)
@given(POINTS, st.randoms())
def test_the_choice_follows_from_validation_values_alone(points, random):
    records = build_parents(points)
    chosen = choose_merge(records, GOALS, 3)
    moved = {"a": Estimate(0.99, 0.0), "b": Estimate(0.01, 0.0)}
    others = [replace(record, test=moved) for record in records]
    random.shuffle(others)
    assert choose_merge(others, GOALS, 3) == chosen


def test_one_parent_or_none_makes_no_merge():
    assert choose_merge([], GOALS, 3) is None
    assert choose_merge(build_parents(LINE[:1]), GOALS, 3) is None
    left, right = build_parents((LINE[0], LINE[2]))
    assert choose_merge([left, right], GOALS, 3) is not None
    for broken in (
        replace(right, checkpoint=None),
        replace(right, state="running"),
        replace(right, role="untrained"),
        replace(right, role="replicate", replicate_of=0),
    ):
        assert choose_merge([left, broken], GOALS, 3) is None


def test_a_wide_gap_is_filled_before_a_crowded_pair():
    points = [(0.1, 0.9), (0.13, 0.89), (0.16, 0.88), (0.9, 0.2)]
    chosen = choose_merge(build_parents(points), GOALS, 2)
    assert chosen is not None
    assert 3 in get_mixture(chosen)


def test_a_good_middle_is_bisected_and_a_bad_one_is_left():
    parents = build_parents((LINE[0], LINE[2]))
    first = choose_merge(parents, GOALS, 2)
    assert first == (Part(0, 60, 0.5), Part(1, 60, 0.5))
    good = choose_merge([*parents, build_merge(2, [(0, 0.5), (1, 0.5)], 0.7, 0.7)], GOALS, 2)
    assert good is not None
    assert set(get_mixture(good).values()) == {0.25, 0.75}
    bad = build_merge(2, [(0, 0.5), (1, 0.5)], 0.05, 0.05, se=0.001)
    assert choose_merge([*parents, bad], GOALS, 2) is None
    refused = build_merge(2, [(0, 0.5), (1, 0.5)], 0.7, 0.7, feasible=False)
    assert choose_merge([*parents, refused], GOALS, 2) is None


def test_a_merge_that_runs_or_has_failed_is_not_repeated():
    parents = build_parents(LINE)
    first = choose_merge(parents, GOALS, 3)
    assert first is not None
    for state in ("running", "failed"):
        tried = build_merge(9, list(get_mixture(first).items()), state=state)
        assert choose_merge([*parents, tried], GOALS, 3) not in (None, first)


def test_a_running_merge_counts_as_if_it_were_where_it_is_predicted():
    # 1 and 2 are equal, so 0 with 2 would fill the gap that the merge of 0 and 1 fills
    parents = build_parents(((0.05, 0.95), (0.6, 0.6), (0.6, 0.6), (0.9, 0.1)))
    first = choose_merge(parents, GOALS, 2)
    assert first is not None
    assert set(get_mixture(first)) == {0, 1}
    mixture = list(get_mixture(first).items())
    failed, running = (
        choose_merge([*parents, build_merge(9, mixture, state=state)], GOALS, 2)
        for state in ("failed", "running")
    )
    assert failed is not None
    assert set(get_mixture(failed)) == {0, 2}
    assert running is not None
    assert 3 in get_mixture(running)


def test_a_dominated_parent_changes_nothing():
    parents = build_parents(LINE)
    for point in ((0.05, 0.3), (0.2, 0.2), (0.4, 0.05)):
        assert choose_merge([*parents, build_parent(3, *point)], GOALS, 3) == choose_merge(
            parents, GOALS, 3
        )


def test_a_parent_that_breaks_a_constraint_is_merged_and_hides_no_other():
    # 1 is infeasible and dominates 2, which is a candidate all the same
    breaks = replace(build_parent(1, 0.7, 0.7), feasible=False)
    records = [build_parent(0, 0.1, 0.9), breaks, build_parent(2, 0.6, 0.3)]
    merged: set[int] = set()
    while parts := choose_merge(records, GOALS, 2):
        merged |= {part.trial for part in parts}
        failed = build_merge(len(records) + 7, [(p.trial, p.weight) for p in parts], state="failed")
        records.append(failed)
    assert merged == {0, 1, 2}


def test_a_checkpoint_is_a_parent_with_its_own_step():
    checkpoint = replace(
        build_parent(5, 0.9, 0.1), role="checkpoint", parts=(Part(1, 20, 1.0),), params={}
    )
    chosen = choose_merge([build_parent(0, 0.1, 0.9), checkpoint], GOALS, 2)
    assert chosen == (Part(0, 60, 0.5), Part(1, 20, 0.5))


def test_the_scale_and_the_direction_of_objectives_do_not_matter():
    points = [(0.1, 0.9), (0.5, 0.6), (0.55, 0.5), (0.9, 0.1)]
    records = build_parents(points)

    def turn(record):
        scaled = {
            "a": record.validation["a"],
            "b": Estimate(-100 * record.validation["b"].mean, 100 * record.validation["b"].se),
        }
        return replace(record, validation=scaled, rungs=(Rung(60, scaled, Cost()),))

    goals = (GOALS[0], Objective("b", "minimize", 0.0))
    assert choose_merge([turn(r) for r in records], goals, 3) == choose_merge(records, GOALS, 3)


def test_a_thousand_parents_give_a_choice():
    rng = np.random.default_rng(0)
    angles = rng.uniform(0.1, 1.4, 1000)
    radii = rng.uniform(0.3, 0.9, 1000)
    points = np.column_stack([radii * np.cos(angles), radii * np.sin(angles)])
    assert choose_merge(build_parents(points.tolist()), GOALS, 3) is not None


def test_a_measured_merge_is_predicted_where_it_was_measured():
    records = [
        *build_parents((LINE[0], LINE[2]), first=0),
        build_merge(2, [(0, 0.5), (1, 0.5)], 0.7, 0.4, se=1e-6),
    ]
    known = read_merges(records, GOALS)
    parents = known[:2]
    end, half, near = {(0, 60): 1.0}, {(0, 60): 0.5, (1, 60): 0.5}, {(0, 60): 0.6, (1, 60): 0.4}
    means, errors = predict_losses([end, half, near], parents, known)
    assert means[1] == pytest.approx([-0.7, -0.4], abs=1e-3)
    assert errors[1] == pytest.approx([0, 0], abs=1e-3)
    assert means[0] == pytest.approx([-0.1, -0.9], abs=0.02)
    before, _ = predict_losses([near], parents, parents)
    assert means[2, 0] < before[0, 0]  # the gain half way is also one nearby
    assert (errors[2] > errors[1]).all()


def test_between_parents_the_expectation_is_a_little_above_the_line():
    known = read_merges(build_parents((LINE[0], LINE[2])), GOALS)
    certain = [replace(entry, errors=0 * entry.errors) for entry in known]
    (mean,), (error,) = predict_losses([{(0, 60): 0.5, (1, 60): 0.5}], certain, certain)
    # half way, u is the difference of 0.8; gain and deviations are shares of it
    assert -mean == pytest.approx([0.5 + 0.08 * 0.8] * 2)
    assert error == pytest.approx([0.8 * math.hypot(0.1, 0.15)] * 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 12), st.integers(0, 10**6))
def test_expected_gains_equal_the_mean_over_draws(objectives, size, seed):
    rng = np.random.default_rng(seed)
    goals = [Objective(str(n), "minimize", 0.0) for n in range(objectives)]
    front = -rng.uniform(-0.1, 1, (size, objectives))
    mean, error = -rng.uniform(0.2, 0.8, (1, objectives)), rng.uniform(0, 0.2, (1, objectives))
    (found,) = compute_expected_gains(mean, error, front, np.zeros(objectives))
    before = compute_loss_hypervolume(front, goals)
    drawn = mean + error * rng.standard_normal((1500, objectives))
    gains = [compute_loss_hypervolume(np.vstack([front, [d]]), goals) - before for d in drawn]
    assert found == pytest.approx(np.mean(gains), abs=5 * np.std(gains) / math.sqrt(1500) + 1e-4)


def test_a_value_that_is_unknown_gains_nothing():
    found = compute_expected_gains(
        np.array([[np.nan, -1.0], [-1.0, -1.0]]), np.zeros((2, 2)), np.empty((0, 2)), np.zeros(2)
    )
    assert found == pytest.approx([0, 1])


def test_a_merge_of_an_extended_sweep_consists_of_policies_that_were_kept():
    """`keep: front` (docs/reference.md) deletes the other policies when a sweep ends."""
    records = build_parents([(0.3, 0.3), (0.25, 0.35), (0.35, 0.25), (0.9, 0.1), (0.1, 0.9)])
    records += [
        build_merge(10, [(3, 0.25), (4, 0.75)], 0.4, 0.85),
        build_merge(11, [(3, 0.75), (4, 0.25)], 0.85, 0.4),
    ]
    between = {part.trial for part in choose_merge(records, GOALS, 2)}
    assert between == {3, 4}
    records[3:5] = [replace(record, checkpoint=None) for record in records[3:5]]
    parts = choose_merge(records, GOALS, 2)
    assert parts is None or {part.trial for part in parts} <= {0, 1, 2}


def test_a_wished_merge_may_consist_of_kept_checkpoints_of_the_search_alone():
    kept = {"kept": (20,), "checkpoint": Path("checkpoint-60")}
    curve = ((20, 0.2, 0.9), (60, 0.8, 0.4))
    search = build_curve(0, *curve, **kept)
    others = [
        build_curve(1, *curve, **kept, replicate_of=0),
        build_curve(2, *curve, **kept, state="failed"),
    ]
    merge = build_merge(3, [(0, 0.5), (4, 0.5)], 0.7, 0.7)
    parents, measured = list_merge_parents([search, *others, merge], GOALS)
    assert [parent.policy for parent in parents] == [(0, 60), (0, 20)]
    assert [entry.mixture for entry in measured] == [
        {(0, 60): 1.0},
        {(0, 20): 1.0},
        {(0, 60): 0.5, (4, 60): 0.5},
    ]


def is_allowed(means):
    return True


def build_rungs(*values: tuple[int, float, float]):
    return tuple(
        Rung(step, {"a": Estimate(a, 0.01), "b": Estimate(b, 0.01)}, Cost(64 * step))
        for step, a, b in values
    )


def build_curve(number, *values, kept, **fields):
    """Build a trial with these validation values, the last of which is its end."""
    end = values[-1]
    rungs = build_rungs(*values)
    fields = {"rungs": rungs, "kept_steps": kept, "validation": rungs[-1].validation, **fields}
    return build_trial(number, end[1], end[2], **fields)


def test_the_largest_contribution_comes_first_and_dominated_ones_never():
    first = build_curve(1, (20, 0.2, 0.9), (40, 0.3, 0.5), (60, 0.8, 0.4), kept=(20, 40))
    other = build_curve(2, (20, 0.9, 0.2), (60, 0.5, 0.6), kept=(20,))
    # 1@40 is dominated by the end of 2
    assert rank_checkpoints([first, other], GOALS, is_allowed) == [
        Part(1, 20, 1.0),
        Part(2, 20, 1.0),
    ]


def test_only_checkpoints_that_exist_are_chosen():
    trial = build_curve(1, (20, 0.2, 0.9), (60, 0.8, 0.4), kept=())
    assert rank_checkpoints([trial], GOALS, is_allowed) == []
    assert choose_checkpoint([], GOALS, is_allowed) is None


def test_an_evaluated_checkpoint_is_not_chosen_again():
    trial = build_curve(1, (20, 0.2, 0.9), (40, 0.4, 0.6), (60, 0.8, 0.4), kept=(20, 40))
    first = choose_checkpoint([trial], GOALS, is_allowed)
    assert first == Part(1, 20, 1.0)
    done = build_checkpoint(2, 0.1, 0.85, (1, 20))  # a second look was less favourable
    assert choose_checkpoint([trial, done], GOALS, is_allowed) == Part(1, 40, 1.0)


def test_test_values_decide_nothing():
    trial = build_curve(1, (20, 0.2, 0.9), (60, 0.8, 0.4), kept=(20,))
    luckier = build_curve(
        1,
        (20, 0.2, 0.9),
        (60, 0.8, 0.4),
        kept=(20,),
        test={"a": Estimate(1, 0), "b": Estimate(1, 0)},
    )
    assert (
        choose_checkpoint([trial], GOALS, is_allowed)
        == choose_checkpoint([luckier], GOALS, is_allowed)
        is not None
    )


def test_a_dominated_infeasible_end_does_not_count():
    kept = build_curve(1, (20, 0.5, 0.5), (60, 0.7, 0.3), kept=(20,))
    infeasible = build_curve(2, (60, 0.9, 0.9), kept=(), feasible=False)
    assert rank_checkpoints([kept, infeasible], GOALS, is_allowed) == [Part(1, 20, 1.0)]


def test_a_checkpoint_that_breaks_a_constraint_is_not_chosen():
    trial = build_curve(1, (20, 0.2, 0.9), (40, 0.4, 0.6), (60, 0.8, 0.4), kept=(20, 40))
    choice = choose_checkpoint([trial], GOALS, lambda means: means["a"] >= 0.3)
    assert choice == Part(1, 40, 1.0)
