"""Which configuration is trained again: the one whose next seed decides most."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.analysis.replicates import choose_replicate, count_expected_changes, pool_trials
from gdpo_tune.core.trials import Cost, Objective, Part, Rung
from tests.support.analysis import GOALS, build_merge, build_trial, list_front_numbers


def test_nothing_to_replicate_without_a_front():
    assert choose_replicate([], GOALS, 2, 8) is None
    assert choose_replicate([build_trial(0, 0.5, 0.5, feasible=False)], GOALS, 2, 8) is None
    assert choose_replicate([build_trial(0, 0.5, 0.5, role="untrained")], GOALS, 2, 8) is None


@pytest.mark.parametrize(("gap", "error", "seeds"), [(0.0, 0.1, 1), (0.05, 0.1, 1), (0.2, 0.1, 3)])
def test_the_value_of_a_seed_is_that_of_two_rivals_in_closed_form(gap, error, seeds):
    # In one objective the leader falls behind where its mean moves by more than the gap, and then
    # two memberships change; equal points share the front until one moves.
    goal = (Objective("a", "maximize", 0.0),)
    leader, rival = count_expected_changes([[0.5], [0.5 - gap]], [[error], [0.0]], [seeds, 9], goal)
    step = error / math.sqrt(seeds + 1)
    if gap:
        assert leader == pytest.approx(2 * NormalDist().cdf(-gap / step), abs=0.1)
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


def build_copy(number, original, a, b):
    rung = (Rung(60, {}, Cost()),)
    return build_trial(
        number, a, b, replicate_of=original, rungs=rung, checkpoint=Path("checkpoint-60")
    )


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
