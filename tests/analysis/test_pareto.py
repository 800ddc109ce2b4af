import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gdpo_tune.analysis.pareto import (
    NOT_RANKED,
    compute_contributions,
    compute_coverage,
    compute_hypervolume,
    rank_points,
)
from gdpo_tune.analysis.uncertainty import estimate_front_probability
from gdpo_tune.core.trials import Direction, Objective

DIRECTIONS: tuple[Direction, ...] = ("maximize", "minimize", "maximize", "minimize")


def goals(count: int, reference: float = 0.0) -> list[Objective]:
    return [Objective(f"o{i}", DIRECTIONS[i], reference) for i in range(count)]


def maximised(count: int) -> list[Objective]:
    return [Objective(f"o{i}", "maximize", 0.0) for i in range(count)]


@st.composite
def clouds(draw: st.DrawFn):
    """A few points on a coarse grid, so that ties and duplicates are common; some unmeasured."""
    columns = draw(st.integers(1, 4))
    rows = draw(st.integers(0, 9))
    cell = st.sampled_from([-1.0, 0.0, 1.0, 2.0, 3.0, float("nan"), float("inf")])
    return draw(arrays(float, (rows, columns), elements=cell)), goals(columns)


def beats(a, b, objectives) -> bool:
    signs = np.array([1 if o.direction == "maximize" else -1 for o in objectives])
    better = signs * (a - b)
    return bool((better >= 0).all() and (better > 0).any())


def brute_ranks(values, objectives):
    left = [i for i in range(len(values)) if np.isfinite(values[i]).all()]
    result = [NOT_RANKED] * len(values)
    rank = 0
    while left:
        front = [i for i in left if not any(beats(values[j], values[i], objectives) for j in left)]
        for i in front:
            result[i] = rank
        left = [i for i in left if i not in front]
        rank += 1
    return result


@given(clouds())
def test_ranks_equal_repeated_removal_of_the_front(cloud):
    values, objectives = cloud
    expected = brute_ranks(values, objectives)
    assert rank_points(values, objectives).tolist() == expected


@given(clouds())
def test_hypervolume_counts_the_unit_cells_that_some_point_covers(cloud):
    values, objectives = cloud
    # Everything lies on integers and the reference is 0, so the volume is a number of unit cells.
    measured = values[np.isfinite(values).all(axis=1)]
    gains = np.array(
        [
            v if o.direction == "maximize" else -v
            for v, o in zip(measured.T, objectives, strict=True)
        ]
    )
    cells = np.array(np.meshgrid(*[np.arange(3) + 0.5] * len(objectives))).reshape(
        len(objectives), -1
    )
    covered = [any((gains[:, t] > cell).all() for t in range(gains.shape[1])) for cell in cells.T]
    assert compute_hypervolume(values, objectives) == pytest.approx(sum(covered))


def test_hypervolume_of_one_point_is_its_box():
    objectives = [Objective("a", "maximize", 0.1), Objective("b", "minimize", 5.0)]
    assert compute_hypervolume([[0.6, 3.0]], objectives) == pytest.approx(0.5 * 2.0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_point_beyond_the_reference_adds_nothing_and_does_not_raise(count):
    objectives = maximised(count)
    inside = [0.5] * count
    beyond = [9.0] * (count - 1) + [-0.1]
    assert compute_hypervolume([inside, beyond], objectives) == pytest.approx(0.5**count)
    assert compute_hypervolume([beyond], objectives) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_no_points(count):
    objectives = maximised(count)
    assert compute_hypervolume([], objectives) == 0
    assert rank_points([], objectives).tolist() == []
    assert estimate_front_probability([], [], objectives).tolist() == []


@given(clouds())
def test_hypervolume_never_falls_with_another_point(cloud):
    values, objectives = cloud
    volumes = [compute_hypervolume(values[:count], objectives) for count in range(len(values) + 1)]
    assert (np.diff(volumes) >= -1e-12).all()


@given(clouds())
def test_a_contribution_is_what_the_front_loses_without_the_point(cloud):
    points, objectives = cloud
    front = np.flatnonzero(rank_points(points, objectives) == 0)
    whole = compute_hypervolume(points, objectives)
    lost = np.zeros(len(points))
    for i in front:
        lost[i] = whole - compute_hypervolume(points[front[front != i]], objectives)
    assert compute_contributions(points, objectives) == pytest.approx(lost, abs=1e-9)


def test_coverage_is_the_share_that_is_matched_or_beaten():
    """Source: Zitzler and Thiele 1999: not symmetric; nothing is said of a front without points."""
    left, right = np.array([[0.0, 3.0], [2.0, 1.0]]), np.array([[0.0, 3.0], [1.0, 1.0], [3.0, 1.5]])
    assert compute_coverage(left, right) == pytest.approx(2 / 3)
    assert compute_coverage(right, left) == 1
    assert compute_coverage(np.empty((0, 2)), right) == 0
    assert np.isnan(compute_coverage(left, np.empty((0, 2))))


def test_values_of_the_wrong_width_are_refused():
    with pytest.raises(ValueError, match="2 objectives"):
        rank_points([[1.0, 2.0, 3.0]], maximised(2))


def test_probability_without_noise_is_membership():
    values = [[0.9, 0.1], [0.1, 0.9], [0.05, 0.05], [0.9, 0.1]]
    assert estimate_front_probability(values, np.zeros((4, 2)), maximised(2)).tolist() == [
        1,
        1,
        0,
        1,
    ]


def test_probability_of_two_points_in_one_objective_is_the_normal_tail():
    # P(a > b) with means 1 and 0 and a difference of standard deviation 1 is Phi(1) = .8413.
    error = [[0.5**0.5], [0.5**0.5]]
    found = estimate_front_probability([[1.0], [0.0]], error, maximised(1), draws=20_000)
    assert found == pytest.approx([0.8413, 0.1587], abs=0.012)
    assert found.sum() == pytest.approx(1)
    down = [Objective("o", "minimize", 9.0)]
    assert estimate_front_probability([[1.0], [0.0]], error, down)[0] < 0.2


def test_leaving_out_hopeless_points_changes_no_probability():
    generator = np.random.default_rng(3)
    near = generator.random((6, 2)) + 1
    alone = estimate_front_probability(near, np.full((6, 2), 0.1), maximised(2), draws=2_000)
    values = np.vstack([near, generator.random((30, 2)) - 9])
    together = estimate_front_probability(values, np.full((36, 2), 0.1), maximised(2), draws=2_000)
    assert together[:6].tolist() == alone.tolist()
    assert (together[6:] == 0).all()
