"""Configurations over their seeds, the front of them, and which one is trained again."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.analysis import replicates
from gdpo_tune.analysis.front import build_front
from gdpo_tune.analysis.pareto import NOT_RANKED
from gdpo_tune.analysis.replicates import (
    choose_replicate,
    count_expected_changes,
    pool_estimates,
    pool_trials,
)
from gdpo_tune.core.trials import Cost, Estimate, Objective, Part, Rung
from tests.support.analysis import GOALS, build_merge, build_trial, list_front_numbers

# One configuration over its seeds


def test_one_seed_keeps_its_bootstrap_error_and_is_provisional():
    (only,) = pool_trials([build_trial(0, 0.5, 0.4, se=0.03)], GOALS)
    assert only.mean["a"] == Estimate(0.5, 0.03)
    assert only.seeds == 1
    assert only.is_provisional
    two = [build_trial(0, 0.5, 0.4), build_trial(1, 0.6, 0.4, replicate_of=0)]
    assert not pool_trials(two, GOALS)[0].is_provisional


def test_seeds_are_averaged_and_their_spread_is_the_error():
    records = [
        build_trial(0, 0.5, 0.4),
        build_trial(1, 0.7, 0.4, replicate_of=0),
        build_trial(2, 0.9, 0.4, replicate_of=0),
    ]
    (merged,) = pool_trials(records, GOALS)
    assert merged.numbers == (0, 1, 2)
    assert merged.first == 0
    assert merged.role == "search"
    assert merged.mean["a"].mean == pytest.approx(0.7)
    assert merged.mean["a"].se == pytest.approx(0.2 / math.sqrt(3))
    assert not merged.is_provisional


@given(
    st.lists(st.builds(Estimate, mean=st.floats(-3, 3), se=st.floats(0, 1)), min_size=2, max_size=6)
)
def test_the_pooled_error_is_never_below_spread_or_evaluation(seeds):
    found = pool_estimates(seeds)
    count = len(seeds)
    spread = statistics.stdev(seed.mean for seed in seeds) / math.sqrt(count)
    evaluation = math.sqrt(sum(seed.se**2 for seed in seeds)) / count
    assert found.mean == pytest.approx(statistics.fmean(seed.mean for seed in seeds))
    assert found.se == pytest.approx(max(spread, evaluation))


def test_what_seeds_differ_by_anywhere_is_the_least_error_everywhere():
    # configuration 0: means .4 .6, squares .02; configuration 2: .1 .4 .7, squares .18; 3 degrees
    pair = [build_trial(0, 0.4, 0.5), build_trial(1, 0.6, 0.5, replicate_of=0)]
    three = [
        build_trial(2, 0.1, 0.5),
        build_trial(3, 0.4, 0.5, replicate_of=2),
        build_trial(4, 0.7, 0.5, replicate_of=2),
    ]
    alone = build_trial(5, 0.5, 0.5, se=0.03)
    untrained = build_trial(6, 0.2, 0.2, se=0.03, role="untrained")
    known = {c.first: c for c in pool_trials([*pair, *three, alone, untrained], GOALS)}
    sigma = math.sqrt(0.2 / 3)
    assert (known[5].mean["a"].mean, known[5].mean["a"].se) == (0.5, pytest.approx(sigma))
    assert known[0].mean["a"].se == pytest.approx(sigma / math.sqrt(2))
    assert known[2].mean["a"].se == pytest.approx(0.3 / math.sqrt(3))  # its own is larger
    assert known[5].mean["b"].se == 0.03  # seeds agree there: the evaluation's noise stays
    assert known[6].mean["a"].se == 0.03  # nothing was trained


def test_few_replicates_widen_every_interval():
    """Source: Student's t has 4.303 standard errors at 95 % with 2 degrees of freedom."""
    pairs = [
        build_trial(
            number, 0.5 + 0.1 * number, 0.5, replicate_of=number - 1 if number % 2 else None
        )
        for number in range(4)
    ]
    found = {c.first: c.mean["a"] for c in pool_trials([*pairs, build_trial(4, 0.5, 0.5)], GOALS)}
    sigma = math.sqrt(0.02 / 2 / 2)
    for first, seeds in ((0, 2), (4, 1)):
        reach = 4.303 * sigma / math.sqrt(seeds)
        assert found[first].df == 2
        assert found[first].high - found[first].mean == pytest.approx(reach, rel=1e-3)
        assert found[first].mean - found[first].low == pytest.approx(reach, rel=1e-3)


def test_equal_parameters_are_one_configuration_even_without_a_replicate():
    records = [build_trial(0, 0.5, 0.5), build_trial(1, 0.7, 0.5, params={"lr": 0.0})]
    (merged,) = pool_trials(records, GOALS)
    assert merged.numbers == (0, 1)


def test_published_weights_that_the_search_also_tried_stay_published():
    records = [
        build_trial(0, 0.5, 0.5, role="published"),
        build_trial(1, 0.7, 0.5, params={"lr": 0.0}),
    ]
    (merged,) = pool_trials(records, GOALS)
    assert merged.role == "published"


def test_the_untrained_policy_is_never_merged_nor_on_the_front():
    untrained = build_trial(0, 0.99, 0.99, role="untrained", params={"lr": 1.0})
    records = [untrained, build_trial(1, 0.5, 0.5)]
    found = pool_trials(records, GOALS)
    assert [c.numbers for c in found] == [(0,), (1,)]
    assert [c.rank for c in found] == [NOT_RANKED, 0]
    assert [c.probability for c in found] == [0, 1]


@pytest.mark.parametrize("state", ["running", "paused", "pruned", "failed"])
def test_only_complete_trials_count(state):
    records = [build_trial(0, 0.5, 0.5), build_trial(1, 0.9, 0.9, state=state)]
    assert [c.first for c in pool_trials(records, GOALS)] == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_enters(bad):
    records = [
        build_trial(0, 0.5, 0.5),
        build_trial(1, bad, 0.9),
        build_trial(2, 0.5, 0.9, replicate_of=0, se=bad),
    ]
    (only,) = pool_trials(records, GOALS)
    assert only.numbers == (0,)


def test_a_missing_objective_is_not_a_complete_trial():
    assert pool_trials([build_trial(0, 0.5, 0.5, test={"a": Estimate(1, 0)})], GOALS) == []


def test_metrics_that_are_no_objectives_are_merged_where_all_seeds_have_them():
    both = {"a": Estimate(0.5, 0), "b": Estimate(0.5, 0), "c": Estimate(4, 0)}
    records = [
        build_trial(0, 0, 0, test=both),
        build_trial(1, 0, 0, replicate_of=0, test={**both, "d": Estimate(1, 0)}),
    ]
    (merged,) = pool_trials(records, GOALS)
    assert set(merged.mean) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("verdicts", "feasible"),
    [
        ([True], True),
        ([False], False),
        ([None], True),
        ([True, False], False),
        ([True, True, False], True),
        ([False, True, False], False),
    ],
)
def test_more_than_half_of_the_seeds_decide_feasibility(verdicts, feasible):
    records = [
        build_trial(number, 0.5, 0.5, replicate_of=0 if number else None, feasible=verdict)
        for number, verdict in enumerate(verdicts)
    ]
    (merged,) = pool_trials(records, GOALS)
    assert merged.feasible is feasible
    assert merged.is_on_front is feasible


def test_an_infeasible_configuration_dominates_nobody():
    records = [
        build_trial(0, 0.9, 0.9, feasible=False),
        build_trial(1, 0.5, 0.5),
        build_trial(2, 0.4, 0.4),
    ]
    assert [c.rank for c in pool_trials(records, GOALS)] == [NOT_RANKED, 0, 1]


# The front


def test_an_empty_front():
    front = build_front([], GOALS)
    assert (front.members, front.knee, front.extremes) == ((), None, {})
    assert (front.hypervolume, front.hypervolume_over_trials) == (0, ())


def test_a_front_of_one():
    front = build_front([build_trial(0, 0.5, 0.4)], GOALS)
    assert [member.first for member in front.members] == [0]
    assert front.knee is front.members[0]
    assert front.extremes == {"a": front.members[0], "b": front.members[0]}
    assert front.hypervolume == pytest.approx(0.2)


def test_members_run_from_the_best_to_the_worst_first_objective():
    records = [
        build_trial(0, 0.1, 0.9),
        build_trial(1, 0.9, 0.1),
        build_trial(2, 0.5, 0.5),
        build_trial(3, 0.4, 0.4),
    ]
    front = build_front(records, GOALS)
    assert [member.first for member in front.members] == [1, 2, 0]
    assert {name: c.first for name, c in front.extremes.items()} == {"a": 1, "b": 0}
    down = (Objective("a", "minimize", 1.0), GOALS[1])
    assert [member.first for member in build_front(records, down).members] == [0]


def test_baselines_are_the_untrained_policy_and_the_published_weights():
    records = [
        build_trial(0, 0.1, 0.1, role="untrained"),
        build_trial(1, 0.9, 0.9, role="published"),
    ]
    front = build_front([*records, build_trial(2, 0.5, 0.5)], GOALS)
    assert [c.role for c in front.baselines] == ["untrained", "published"]
    assert [c.first for c in front.members] == [1]


def test_the_hypervolume_falls_when_a_replicate_corrects_a_lucky_trial():
    records = [
        build_trial(0, 0.8, 0.5, finished=3.0),
        build_trial(1, 0.2, 0.2, finished=1.0),
        build_trial(2, 0.0, 0.0, state="failed", finished=2.0, test={}),
        build_trial(3, 0.4, 0.5, replicate_of=0, finished=4.0),
        build_trial(4, 0.9, 0.9, state="running", finished=None),
    ]
    trace = build_front(records, GOALS).hypervolume_over_trials
    assert [point.number for point in trace] == [1, 2, 0, 3]
    assert [p.hypervolume for p in trace] == pytest.approx([0.04, 0.04, 0.4, 0.3])


@settings(max_examples=12)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 3)), max_size=9))
def test_the_trace_equals_the_front_rebuilt_after_each_trial(rows):
    records = [
        build_trial(
            number, a, b, replicate_of=group if group < number else None, feasible=group != 2
        )
        for number, (a, b, group) in enumerate(rows)
    ]
    trace = build_front(records, GOALS).hypervolume_over_trials
    rebuilt = [build_front(records[: end + 1], GOALS).hypervolume for end in range(len(records))]
    assert [point.hypervolume for point in trace] == pytest.approx(rebuilt)


def test_probabilities_are_the_same_every_time():
    records = [build_trial(n, 0.5 + 0.01 * n, 0.5 - 0.01 * n) for n in range(6)]
    first, second = (pool_trials(records, GOALS) for _ in range(2))
    assert [c.probability for c in first] == [c.probability for c in second]
    assert any(0 < c.probability < 1 for c in first)


@given(st.floats(0, 1), st.integers(1, 9))
def test_seeds_that_agree_pool_to_exactly_their_value(mean, count):
    assert pool_estimates([Estimate(mean, 0.02)] * count).mean == mean


def test_nothing_to_replicate_without_a_front():
    assert choose_replicate([], GOALS, 2, 8) is None
    assert choose_replicate([build_trial(0, 0.5, 0.5, feasible=False)], GOALS, 2, 8) is None
    assert choose_replicate([build_trial(0, 0.5, 0.5, role="untrained")], GOALS, 2, 8) is None


@pytest.mark.parametrize(("gap", "error", "seeds"), [(0.0, 0.1, 1), (0.05, 0.1, 1), (0.2, 0.1, 3)])
def test_the_value_of_a_seed_is_that_of_two_rivals_in_closed_form(monkeypatch, gap, error, seeds):
    # In one objective the leader falls behind where its mean moves by more than the gap, and then
    # two memberships change; equal points share the front until one moves.
    goal = (Objective("a", "maximize", 0.0),)
    monkeypatch.setattr(replicates, "DRAWS", 50_000)
    leader, rival = count_expected_changes([[0.5], [0.5 - gap]], [[error], [0.0]], [seeds, 9], goal)
    step = error / math.sqrt(seeds + 1)
    if gap:
        assert leader == pytest.approx(2 * NormalDist().cdf(-gap / step), abs=0.01)
    else:
        assert leader == 1  # it gets ahead, or falls behind: one of the two leaves
    assert rival == 0  # its mean is known


def test_a_point_with_several_rivals_decides_about_all_that_it_would_beat():
    # 0 is on the front; moved by one error it dominates 1 and 2, which are incomparable
    means = [[0.5, 0.5], [0.55, 0.52], [0.52, 0.55]]
    certain = count_expected_changes(means, [[0.0, 0.0]] * 3, [1, 1, 1], GOALS)
    assert certain.tolist() == [0, 0, 0]
    lively = count_expected_changes(means, [[10.0, 10.0], [0.0, 0.0], [0.0, 0.0]], [1, 1, 1], GOALS)
    # a huge step: above both in a quarter (it comes, two leave), below both in a quarter (nothing
    # changes), and incomparable in half (it comes)
    assert lively[0] == pytest.approx(0.25 * 3 + 0.5 * 1, abs=0.1)


def test_the_next_seed_goes_where_it_decides_most():
    # 0 is far ahead in b; 1 and 2 are half a standard error apart, and one of them is in doubt
    records = [build_trial(0, 0.1, 0.9), build_trial(1, 0.5, 0.5), build_trial(2, 0.49, 0.49)]
    found = choose_replicate(records, GOALS, 2, 8)
    assert found is not None
    assert found.original in (1, 2)
    assert found.params == {"lr": float(found.original)}


def test_a_rival_just_below_the_front_may_be_trained_again():
    records = [build_trial(0, 0.5, 0.5, se=0.001), build_trial(1, 0.49, 0.49, se=0.1)]
    found = choose_replicate(records, GOALS, 2, 8)
    assert found is not None
    assert found.original == 1


def test_members_that_nothing_threatens_take_turns():
    records = [
        build_trial(0, 0.1, 0.9),
        build_trial(1, 0.9, 0.1),
        build_trial(2, 0.9, 0.1, replicate_of=1),
    ]
    found = choose_replicate(records, GOALS, 2, 8)
    assert found is not None
    assert found.original == 0


def test_replicates_on_their_way_count():
    records = [
        build_trial(0, 0.1, 0.9),
        build_trial(1, 0.9, 0.1),
        build_trial(2, 0, 0, replicate_of=0, state="running"),
    ]
    found = choose_replicate(records, GOALS, 2, 8)
    assert found is not None
    assert found.original == 1
    records.append(build_trial(3, 0, 0, replicate_of=1, state="running"))
    assert choose_replicate(records, GOALS, 1, 8) is None
    assert choose_replicate(records, GOALS, 2, 2) is None


def test_a_configuration_that_keeps_failing_is_not_trained_for_ever():
    records = [build_trial(0, 0.5, 0.5)]
    records += [build_trial(n, 0, 0, replicate_of=0, state="failed") for n in (1, 2)]
    assert choose_replicate(records, GOALS, 2, 8) is None


def test_dominated_configurations_are_not_trained_again():
    records = [build_trial(0, 0.9, 0.9), build_trial(1, 0.1, 0.1)]
    assert plan(records, per_point=2, max_runs=8) == [0, 0]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=8),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_limits_hold_and_the_whole_front_gets_its_runs_where_they_suffice(
    points, per_point, max_runs
):
    records = [build_trial(number, *point) for number, point in enumerate(points)]
    members = list_front_numbers(records)
    planned = plan(records, per_point, max_runs)
    assert min(max_runs, per_point * len(members)) <= len(planned) <= max_runs
    assert all(planned.count(number) <= per_point for number in planned)
    if len(planned) < max_runs:
        assert all(planned.count(member) == per_point for member in members)


def plan(records, per_point, max_runs):
    """Originals that are trained again when every replicate repeats its original exactly."""
    records, planned = list(records), []
    while (found := choose_replicate(records, GOALS, per_point, max_runs)) is not None:
        original = records[found.original]
        a, b = (original.test[goal.name].mean for goal in GOALS)
        records.append(build_trial(len(records), a, b, replicate_of=found.original))
        planned.append(found.original)
    return planned


def build_pair(**fields):
    """Build two trainings of 60 steps whose policies exist."""
    rung = (Rung(60, {}, Cost()),)
    kept = {"rungs": rung, "checkpoint": Path("checkpoint-60"), **fields}
    return [build_trial(0, 0.2, 0.9, **kept), build_trial(1, 0.9, 0.2, **kept)]


def build_copy(number, original, a, b, **fields):
    kept = {"rungs": (Rung(60, {}, Cost()),), "checkpoint": Path("checkpoint-60"), **fields}
    return build_trial(number, a, b, replicate_of=original, **kept)


def test_a_fresh_seed_of_a_merge_consists_of_fresh_seeds_of_its_parts():
    merge = build_merge(2, 0.6, 0.6, (0, 60, 0.25), (1, 60, 0.75))
    records = [*build_pair(), merge, build_copy(3, 0, 0.2, 0.9)]
    # one part has no second seed yet: it is trained again, whatever else is uncertain
    assert choose_replicate(records, GOALS, 1, 8).original == 1
    records.append(build_copy(4, 1, 0.9, 0.2))
    ready = choose_replicate(records, GOALS, 1, 2)  # no training is left, and none is needed
    assert ready.original == 2
    assert ready.parts == (Part(3, 60, 0.25), Part(4, 60, 0.75))
    again = build_trial(5, 0.6, 0.6, replicate_of=2, parts=ready.parts, params={})
    assert choose_replicate([*records, again], GOALS, 1, 8) is None


def test_merges_are_evaluated_again_up_to_the_limit():
    merges = [
        build_merge(2, 0.6, 0.6, (0, 60, 0.5), (1, 60, 0.5)),
        build_merge(3, 0.5, 0.7, (0, 60, 0.75), (1, 60, 0.25)),
    ]
    records = [*build_pair(), *merges, build_copy(4, 0, 0.2, 0.9), build_copy(5, 1, 0.9, 0.2)]
    first = choose_replicate(records, GOALS, 1, 1)
    again = {"replicate_of": first.original, "parts": first.parts, "params": {}}
    records.append(build_trial(6, 0.6, 0.6, **again))
    assert choose_replicate(records, GOALS, 1, 1) is None
    assert choose_replicate(records, GOALS, 1, 3).original == 5 - first.original


def test_a_seed_is_fresh_where_it_has_the_steps_of_its_own_part():
    merge = build_merge(2, 0.6, 0.6, (0, 30, 0.5), (1, 60, 0.5))
    kept = build_copy(3, 0, 0.2, 0.9, kept_steps=(30,), checkpoint=None)
    records = [*build_pair(kept_steps=(30,)), merge, kept, build_copy(4, 1, 0.9, 0.2)]
    assert choose_replicate(records, GOALS, 1, 8).parts == (Part(3, 30, 0.5), Part(4, 60, 0.5))


def test_a_part_that_repeats_the_parameters_of_an_earlier_trial_shares_its_seeds():
    pair = build_pair()
    twin = replace(pair[0], number=2, seed=2)  # an enqueued point, proposed again
    merge = build_merge(3, 0.6, 0.6, (1, 60, 0.5), (2, 60, 0.5))
    records = [*pair, twin, merge, build_copy(4, 0, 0.2, 0.9), build_copy(5, 1, 0.9, 0.2)]
    found = choose_replicate(records, GOALS, 1, 8)
    assert found.original == 3
    assert {part.trial for part in found.parts} == {4, 5}


def test_a_merge_whose_parts_may_not_be_trained_again_stays_alone():
    records = [*build_pair(), build_merge(2, 0.6, 0.6, (0, 60, 0.5), (1, 60, 0.5))]
    assert choose_replicate(records, GOALS, 0, 8) is None


def test_the_seeds_of_a_merge_are_pooled_and_no_parameters_are_compared():
    merge = build_merge(2, 0.6, 0.6, (0, 60, 0.5), (1, 60, 0.5))
    other = build_merge(3, 0.5, 0.7, (0, 60, 0.75), (1, 60, 0.25))
    again = build_trial(
        4, 0.62, 0.58, replicate_of=2, parts=(Part(0, 60, 0.5), Part(1, 60, 0.5)), params={}
    )
    pooled = {c.first: c for c in pool_trials([*build_pair(), merge, other, again], GOALS)}
    assert pooled[2].numbers == (2, 4)
    assert pooled[2].mean["a"].mean == pytest.approx(0.61)
    assert pooled[3].numbers == (3,)
    assert [pooled[n].role for n in (0, 2)] == ["search", "merge"]
    assert [pooled[n].name for n in (0, 2)] == ["0", "merge-2"]
