"""Two searches against each other: figures, tests, verdict, and how often it is wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.analysis.comparison import (
    ALPHA,
    PERMUTATIONS,
    build_arm,
    compare_arms,
    compute_interval,
    compute_p_values,
    compute_permutation_p,
    compute_smallest_p,
    correct_p_values,
)
from gdpo_tune.analysis.pareto import (
    compute_coverage,
    compute_hypervolume,
    select_front,
)
from gdpo_tune.core.trials import Part
from gdpo_tune.results.comparison_report import build_verdict
from tests.support.analysis import GOALS, build_trial


def simulate_search(seed, trials, gain=1.0, noise=0.04, **fields):
    """Draw trials of a trade-off between `a` and `b`, multiplied by `gain`."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(trials):
        share = rng.random()
        a, b = gain * np.sqrt([share, 1 - share]) * rng.uniform(0.5, 0.8) + rng.normal(0, noise, 2)
        records.append(build_trial(number, float(a), float(b), **fields))
    return records


def build_simulated_side(seed, trials, gain=1.0, name="x"):
    return build_arm(name, simulate_search(seed, trials, gain), GOALS)


SETS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))


def error_rate(pairs, trials=12):
    wrong = 0
    for seed in range(pairs):
        p = correct_p_values(
            compute_p_values(
                build_simulated_side(2 * seed, trials), build_simulated_side(2 * seed + 1, trials)
            )
        )
        wrong += min(p) <= ALPHA
    return wrong / pairs


@pytest.mark.slow
def test_equal_searches_are_rarely_called_different():
    # 40 pairs at a rate of .05: more than 6 wrong ones come up in 1 of 300 runs
    assert error_rate(40) <= 6 / 40


@pytest.mark.slow
def test_equal_searches_are_called_different_in_at_most_one_of_twenty():
    assert error_rate(1000) <= 0.05


def test_a_large_difference_is_called_whichever_side_has_it():
    strong, weak = (
        build_simulated_side(1, 24, 1.5, "strong"),
        build_simulated_side(2, 24, 1.0, "weak"),
    )
    verdict = build_verdict(compare_arms(strong, weak))
    assert verdict.winner == "left"
    assert verdict.headline == "strong beats weak: its front covers more."
    turned = build_verdict(compare_arms(weak, strong))
    assert turned.winner == "right"
    assert turned.headline == verdict.headline


def test_a_comparison_turned_round_says_the_same():
    one, other = build_simulated_side(3, 15), build_simulated_side(4, 10, 1.2)
    there, back = compare_arms(one, other), compare_arms(other, one)
    assert there.ratio.value == pytest.approx(1 / back.ratio.value)
    assert there.coverage[0][0] == back.coverage[1][0]
    for name, effect in there.probability_of_superiority.items():
        assert effect.value == pytest.approx(1 - back.probability_of_superiority[name].value)


def test_intervals_hold_what_was_seen():
    found = compare_arms(build_simulated_side(5, 12), build_simulated_side(6, 18))
    shown = [found.ratio, *found.probability_of_superiority.values()]
    pairs = [(effect.value, effect.interval) for effect in shown]
    for value, interval in [*pairs, *found.coverage]:
        assert interval.low <= value <= interval.high


def test_a_side_without_a_front_is_beaten_and_two_are_not_told_apart():
    records = [replace(record, feasible=False) for record in simulate_search(2, 16)]
    broken, whole = build_arm("broken", records, GOALS), build_simulated_side(1, 16, name="whole")
    verdict = build_verdict(compare_arms(broken, whole))
    assert verdict.headline.startswith("whole beats broken: its front covers more")
    assert "each: broken has 0 and whole 0." in verdict.reasons[0]
    assert build_verdict(compare_arms(whole, broken)).winner == "left"
    verdict = build_verdict(compare_arms(broken, broken))
    assert verdict.winner == "undecided"
    assert "each: broken has 0 and broken 0." in verdict.reasons[0]


def test_a_side_that_trades_one_objective_for_the_other_is_mixed():
    a = [build_trial(n, 0.8 + 0.002 * n, 0.2 + 0.002 * n) for n in range(20)]
    b = [build_trial(n, 0.2 + 0.002 * n, 0.8 + 0.002 * n) for n in range(20)]
    verdict = build_verdict(compare_arms(build_arm("a", a, GOALS), build_arm("b", b, GOALS)))
    assert verdict.winner == "mixed"
    assert verdict.headline.startswith("a is better in a and b is better in b;")


def test_too_few_trials_are_said_to_be_too_few():
    found = compare_arms(build_simulated_side(1, 3, 2.0), build_simulated_side(2, 3))
    assert found.smallest_p == pytest.approx(3 * 2 / 20)
    verdict = build_verdict(found)
    assert verdict.winner == "too few"
    assert verdict.headline.endswith("It takes at least 5 of each.")
    assert verdict.reasons == ()  # figures of so few would be taken for a finding


def test_objectives_without_configurations_to_compare_have_no_figures():
    """They had "50 % (95 %: 0 % to 100 %) of pairs" of 2 and 0 configurations."""
    records = [replace(record, proposer="model") for record in simulate_search(1, 16)]
    left = build_arm(
        "a", [replace(records[0], proposer="startup"), *records[1:]], GOALS, shared=True
    )
    right = build_arm("b", simulate_search(2, 16), GOALS, shared=True)
    found = compare_arms(left, right)
    assert len(left.independent) <= 1
    assert found.probability_of_superiority == {}
    reasons = build_verdict(found).reasons
    assert reasons[1].startswith("a and b: nothing to compare. a has ")
    assert reasons[1].endswith("it takes at least 5 of each.")
    assert not any("95 %: 0 % to 100 %" in reason for reason in reasons)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 5), (5, 0)])
def test_an_empty_side_is_too_few_and_breaks_nothing(left, right):
    verdict = build_verdict(
        compare_arms(build_simulated_side(1, left), build_simulated_side(2, right))
    )
    assert verdict.winner == "too few"


def test_the_same_points_on_both_sides_are_as_good_as_equal():
    records = [build_trial(n, 0.5 + 0.0001 * n, 0.5 - 0.0001 * n) for n in range(30)]
    verdict = build_verdict(
        compare_arms(build_arm("a", records, GOALS), build_arm("b", records, GOALS))
    )
    assert verdict.winner == "equal"


def test_what_counts_as_tried():
    records = simulate_search(7, 6)
    records[1] = replace(records[1], state="pruned", test={}, validation={})
    records[2] = replace(records[2], state="failed", test={}, validation={}, reason="NaN")
    records[3] = replace(records[3], feasible=False)
    records[4] = replace(records[4], role="published")
    found = build_arm("x", records, GOALS)
    assert (found.tried_count, found.stopped, found.failed) == (4, 1, 1)
    assert np.isfinite(found.points).all(axis=1).sum() == 2


def test_candidates_go_with_the_training_that_they_are_made_of():
    records = simulate_search(7, 4)
    records[1] = replace(records[1], state="pruned", test={}, validation={})

    def add(role, state, *parts):
        trial = build_trial(len(records), 0.5, 0.5, role=role, state=state, params={}, parts=parts)
        records.append(trial)

    add("checkpoint", "complete", Part(1, 20, 1.0))  # the training itself was stopped
    add("merge", "complete", Part(0, 60, 0.25), Part(2, 60, 0.75))
    add("merge", "complete", Part(0, 60, 0.5), Part(3, 60, 0.5))
    add("merge", "complete", Part(0, 60, 0.5), Part(99, 60, 0.5))  # another search's parent
    add("merge", "pruned", Part(0, 60, 0.5), Part(2, 60, 0.5))
    add("merge", "failed", Part(2, 60, 0.5), Part(3, 60, 0.5))
    found = build_arm("x", records, GOALS)
    assert (found.tried_count, found.stopped, found.failed) == (4, 0, 0)
    assert [c.first for c in found.configurations] == [0, 2, 3, 4, 5, 6]
    assert found.owners == (0, 1, 2, 3, 1, 2)
    assert [c.first for c in found.independent] == [0, 2, 3]
    assert found.get_points(np.array([1])).tolist() == found.points[[1, 4]].tolist()
    assert found.get_points(np.array([], dtype=int)).shape == (0, 2)


def add_luck(records, each, seed):
    """Add checkpoints that are truly as good as the end of their training."""
    rng = np.random.default_rng(seed)
    made = [
        build_trial(
            len(records) + number,
            record.test["a"].mean + rng.normal(0, 0.02),
            record.test["b"].mean + rng.normal(0, 0.02),
            role="checkpoint",
            parts=(Part(record.number, number, 1.0),),
        )
        for number, record in enumerate(records * each)
    ]
    return [*records, *made]


def test_more_candidates_of_a_training_are_not_more_configurations():
    wrong = 0
    for seed in range(15):
        sides = [
            build_arm("x", add_luck(simulate_search(each, 10), 2, each), GOALS)
            for each in (2 * seed, 2 * seed + 1)
        ]
        wrong += min(correct_p_values(compute_p_values(*sides))) <= ALPHA
    # more than 3 come up in 1 of 200 runs at a rate of .05, and in most at the rate of .3 that
    # candidates drawn one by one would have
    assert wrong <= 3


def test_luck_of_more_candidates_is_taken_off():
    left = build_arm("x", add_luck(simulate_search(1, 10), 4, 1), GOALS)
    right = build_arm("y", simulate_search(1, 10), GOALS)
    assert left.optimism > right.optimism > 0
    ours, theirs = compare_arms(left, right).hypervolumes
    assert 1 < compare_arms(left, right).ratio.value < ours / theirs


def test_an_allowance_brings_a_difference_to_the_middle_and_not_beyond():
    values = np.array([3.1, 2.2, 5.0, 0.3, 1.1, 0.9])

    def compute_p(allowance):
        return compute_permutation_p(3, 3, lambda rows: values[rows[:, :3]].sum(axis=1), allowance)

    assert compute_p(0.0) == compute_p(-1.0) < compute_p(2.0) < compute_p(9.0) == compute_p(99.0)
    assert compute_p(99.0) == pytest.approx(1.0, abs=0.1)


def test_what_a_model_proposed_is_not_compared_one_by_one_within_a_sweep():
    records = [
        replace(r, proposer="startup" if r.number < 4 else "model") for r in simulate_search(9, 12)
    ]
    assert len(build_arm("x", records, GOALS).independent) == 12
    found = build_arm("x", records, GOALS, shared=True)
    assert [c.first for c in found.independent] == [0, 1, 2, 3]
    assert found.tried_count == 12


def test_more_trials_do_not_make_a_better_search():
    found = compare_arms(build_simulated_side(8, 10), build_simulated_side(8, 30))
    assert found.count == 10
    whole = compute_hypervolume([c.get_values(GOALS) for c in found.right.configurations], GOALS)
    assert found.hypervolumes[1] < whole


def test_permutations_equal_all_of_them_counted():
    values = np.array([3.1, 2.2, 5.0, 0.3, 1.1, 0.9])
    sums = [sum(c) for c in itertools.combinations(values, 3)]
    seen = values[:3].sum()
    exact = 2 * np.mean([s >= seen - 1e-12 for s in sums])
    found = compute_permutation_p(3, 3, lambda rows: values[rows[:, :3]].sum(axis=1))
    assert found == pytest.approx(exact, abs=0.03)
    assert compute_smallest_p(3, 3) == pytest.approx(2 / 20)
    assert compute_smallest_p(50, 50) == 2 / (PERMUTATIONS + 1)  # not all of them are drawn


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e12])
def test_deals_that_differ_by_rounding_alone_are_equal_on_any_scale(scale):
    rng = np.random.default_rng(0)

    def alike(deals):
        return scale * (1 + 1e-15 * rng.random(len(deals)))

    assert compute_permutation_p(6, 6, alike) == 1.0
    values = scale * np.arange(12.0)[::-1]
    assert compute_permutation_p(6, 6, lambda rows: values[rows[:, :6]].sum(axis=1)) < 0.02


def test_holm_by_hand():
    assert correct_p_values([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_p_values([0.9, 0.8]) == [1.0, 1.0]
    assert correct_p_values([]) == []


def test_the_middle_of_values_that_may_be_infinite():
    found = compute_interval([*range(1000), float("inf"), float("nan")])
    assert (found.low, found.high) == (25, 975)


@given(SETS)
def test_coverage_by_definition(rng):
    left, right = (select_front(rng.integers(0, 6, (5, 3)).astype(float)) for _ in range(2))
    wins = [any(all(a <= b for a, b in zip(p, q, strict=True)) for p in left) for q in right]
    assert compute_coverage(left, right) == pytest.approx(np.mean(wins))
