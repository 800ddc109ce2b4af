"""What the noise of the means leaves of a front: probabilities and the interval of hypervolume."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.analysis.front import build_front
from gdpo_tune.analysis.pareto import compute_hypervolume, rank_points
from gdpo_tune.analysis.uncertainty import (
    Interval,
    compute_quantile,
    estimate_front_probability,
    estimate_hypervolume_interval,
    estimate_optimism,
)
from gdpo_tune.core.trials import Objective
from tests.support.analysis import GOALS, build_trial

ONE = (Objective("a", "maximize", 0.0),)


def test_no_points_have_no_hypervolume():
    assert estimate_hypervolume_interval([], [], GOALS) == Interval(0, 0)
    assert build_front([], GOALS).hypervolume_interval == Interval(0, 0)


def test_without_noise_the_interval_is_the_hypervolume():
    assert estimate_hypervolume_interval([[0.5, 0.4]], [[0, 0]], GOALS) == Interval(
        pytest.approx(0.2), pytest.approx(0.2)
    )


def test_one_point_in_one_objective_has_the_normal_interval():
    found = estimate_hypervolume_interval([[0.5]], [[0.05]], ONE, draws=2_000)
    assert found.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.005)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.005)


def test_one_point_in_two_objectives_has_the_interval_of_a_product():
    a, b, error = 0.8, 0.5, 0.02
    found = estimate_hypervolume_interval([[a, b]], [[error, error]], GOALS, draws=2_000)
    half = 1.96 * math.sqrt((a * error) ** 2 + (b * error) ** 2)
    assert (found.low, found.high) == pytest.approx((a * b - half, a * b + half), abs=0.005)


@pytest.mark.parametrize(
    ("df", "comparisons", "tabled"), [(2, 1, 4.303), (5, 3, 3.4), (20, 3, 2.59)]
)
def test_quantiles_are_those_of_the_tables(df, comparisons, tabled):
    """Source: Student's t; Stoline and Ury 1979, table 3."""
    assert compute_quantile(df, comparisons) == pytest.approx(tabled, abs=0.01)


def test_few_seeds_leave_a_trailing_point_a_chance():
    """Source: Student's t: at 2 errors its tail is far above the normal one."""
    means, errors = [[0.5], [0.5 - 2 * math.sqrt(2) * 0.02]], [[0.02], [0.02]]
    known = estimate_front_probability(means, errors, ONE)[1]
    assert known == pytest.approx(NormalDist().cdf(-2), abs=0.015)
    of_two_seeds = estimate_front_probability(means, errors, ONE, df=1)[1]
    assert of_two_seeds == pytest.approx(0.5 - math.atan(2) / math.pi, abs=0.035)


def test_what_luck_adds_is_taken_off():
    # Twenty equal points: the luckiest leads, at 1.87 standard errors above their common truth.
    # Its hypervolume drawn again lies as far above; a quantile would not come near the truth.
    noisy = 0.5 + 0.1 * np.array([NormalDist().inv_cdf((i + 0.5) / 20) for i in range(20)])
    found = estimate_hypervolume_interval(noisy[:, None], np.full((20, 1), 0.1), ONE)
    drawn = noisy + 0.1 * np.random.default_rng(0).standard_normal((1000, 20))
    assert np.quantile(drawn.max(axis=1), 0.025) > 0.6
    assert found.low < 0.5 < found.high
    assert (found.low + found.high) / 2 < noisy.max() < found.high


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), max_size=6),
    st.floats(0, 0.5),
)
def test_the_interval_holds_the_hypervolume_and_is_a_point_without_noise(points, error):
    def interval(factor: float) -> Interval:
        errors = [(error * factor, error * factor) for _ in points]
        return estimate_hypervolume_interval(points, errors, GOALS, draws=50)

    known = compute_hypervolume(points, GOALS)
    found = interval(1)
    assert 0 <= found.low <= known <= found.high
    assert interval(0) == Interval(pytest.approx(known), pytest.approx(known))


@pytest.mark.slow
def test_the_interval_covers_the_truth_of_many_noisy_fronts():
    rng = np.random.default_rng(0)
    covered, trusting = 0, 0
    for _ in range(100):
        angle = rng.uniform(0, math.pi / 2, 12)
        truth = rng.uniform(0.5, 0.8, (12, 1)) * np.column_stack([np.cos(angle), np.sin(angle)])
        seen = truth + 0.05 * rng.standard_normal(truth.shape)
        exact = compute_hypervolume(truth, GOALS)
        found = estimate_hypervolume_interval(seen, np.full(truth.shape, 0.05), GOALS, draws=100)
        covered += found.low <= exact <= found.high
        trusting += exact < compute_hypervolume(seen, GOALS)
    assert covered >= 90
    assert trusting > 50  # the estimate alone flatters most of them


@pytest.mark.parametrize("count", [5, 50])
def test_the_interval_covers_what_the_claimed_members_truly_have(count):
    rng = np.random.default_rng(1)
    covered, excess, luck = 0, 0.0, 0.0
    for _ in range(40):
        angle = rng.uniform(0, math.pi / 2, count)
        truth = rng.uniform(0.6, 0.8, (count, 1)) * np.column_stack([np.cos(angle), np.sin(angle)])
        errors = np.full(truth.shape, 0.03)
        seen = truth + errors * rng.standard_normal(truth.shape)
        exact = compute_hypervolume(truth[rank_points(seen, GOALS) == 0], GOALS)
        found = estimate_hypervolume_interval(seen, errors, GOALS, draws=40)
        covered += found.low <= exact <= found.high
        excess += compute_hypervolume(seen, GOALS) - exact
        luck += estimate_optimism(seen, errors, GOALS, draws=40)
    assert covered >= 34  # fewer at a rate of .95 come up in 1 of 300 runs
    assert luck / 40 == pytest.approx(excess / 40, abs=0.007)
    assert excess > 0


def test_without_noise_or_points_there_is_no_luck():
    assert estimate_optimism([], [], GOALS) == 0
    assert estimate_optimism([[0.5, 0.4]], [[0, 0]], GOALS) == 0


def test_replicates_tell_the_interval_what_training_adds_to_the_noise():
    alone = [build_trial(0, 0.5, 0.5), build_trial(1, 0.2, 0.7)]
    again = build_trial(2, 0.3, 0.7, replicate_of=1)
    one, two = (build_front(records, GOALS) for records in (alone, [*alone, again]))
    widths = [f.hypervolume_interval.high - f.hypervolume_interval.low for f in (one, two)]
    assert widths[0] < widths[1]


def test_a_lead_within_noise_is_called_a_tie():
    far = build_front([build_trial(0, 0.9, 0.1), build_trial(1, 0.5, 0.6)], GOALS)
    assert [far.list_ties(goal.name) for goal in GOALS] == [[], []]
    assert far.list_labels(far.members[0], ties=True) == ["knee", "best a"]
    near = build_front([build_trial(0, 0.52, 0.1), build_trial(1, 0.5, 0.6)], GOALS)
    assert [[c.first for c in near.list_ties(goal.name)] for goal in GOALS] == [[1], []]
    # a rival that is dominated, by noise perhaps, counts as well
    hidden = build_front([build_trial(0, 0.52, 0.1), build_trial(1, 0.51, 0.09)], GOALS)
    assert hidden.list_labels(hidden.members[0]) == ["knee", "best a", "best b"]
    assert hidden.list_labels(hidden.members[0], ties=True) == [
        "knee",
        "best a (tied with 1)",
        "best b (tied with 1)",
    ]


def test_of_many_ties_the_closest_are_named():
    records = [build_trial(n, 0.5 - n / 1000, 0.2) for n in range(6)]
    (member,) = build_front(records, GOALS).members
    names = build_front(records, GOALS)
    assert "best a (tied with 1, 2, 3 and 2 more)" in names.list_labels(names.members[0], ties=True)
    assert member.first == 0


def test_equal_points_share_their_probability():
    found = estimate_front_probability([[0.5, 0.5]] * 2, [[0, 0]] * 2, GOALS)
    assert found.tolist() == [1, 1]
