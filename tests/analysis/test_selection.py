import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gdpo_tune.analysis.front import (
    find_extremes,
    find_knee,
    is_above,
    subtract_estimates,
)
from gdpo_tune.core.metrics import estimate_mean
from gdpo_tune.core.trials import Estimate, Objective

UP = [Objective("a", "maximize", 0.0), Objective("b", "maximize", 0.0)]


def test_an_empty_front_has_neither_knee_nor_extremes():
    assert find_knee([], UP) is None
    assert find_extremes([], UP) == {}


def test_one_point_is_everything():
    assert find_knee([[0.3, 0.4]], UP) == 0
    assert find_extremes([[0.3, 0.4]], UP) == {"a": 0, "b": 0}


def test_the_knee_of_a_bent_front():
    front = [[0.0, 1.0], [0.5, 0.9], [0.9, 0.8], [1.0, 0.0]]
    assert find_knee(front, UP) == 2
    assert find_extremes(front, UP) == {"a": 3, "b": 0}


def test_minimised_objectives():
    front = [[0.0, 1.0], [0.1, 0.1], [1.0, 0.0]]
    down = [Objective("a", "minimize", 1.0), Objective("b", "minimize", 1.0)]
    assert find_knee(front, down) == 1
    assert find_extremes(front, down) == {"a": 0, "b": 2}


@given(st.lists(st.floats(0.02, 1.55), min_size=1, max_size=8, unique=True))
def test_for_two_objectives_the_knee_is_farthest_from_the_line_of_the_extremes(angles):
    # Points on a quarter circle: all are on the front, the ends are the extremes.
    front = np.array([[np.cos(t), np.sin(t)] for t in [0.0, *angles, np.pi / 2]])
    distances = np.abs(front.sum(axis=1) - 1) / np.sqrt(2)
    assume(np.sort(distances)[-1] - np.sort(distances)[-2] > 1e-6)
    assert find_knee(front, UP) == int(np.argmax(distances))


@given(st.permutations(range(5)), st.floats(0.1, 50), st.floats(-5, 5))
def test_units_and_order_do_not_move_the_knee(order, scale, shift):
    front = np.array([[0, 1.0], [0.3, 0.95], [0.7, 0.8], [0.9, 0.4], [1.0, 0]])
    moved = front[order] * [scale, 1] + [shift, 0]
    assert order[find_knee(moved, UP)] == find_knee(front, UP)


def test_ties_go_to_the_balanced_point():
    three = [*UP, Objective("c", "maximize", 0.0)]
    front = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0.5], [0.9, 0.5, 0.1]]
    assert find_knee(front, three) == 3


def test_a_tie_in_one_objective_goes_to_the_point_better_in_the_others():
    three = [*UP, Objective("c", "maximize", 0.0)]
    front = [[1.0, 0.0, 0.3], [1.0, 0.5, 0.2], [0.0, 1.0, 1.0]]
    assert find_extremes(front, three)["a"] == 1


@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_number_of_objectives(count):
    objectives = [Objective(str(i), "maximize", 0.0) for i in range(count)]
    corners = np.eye(count)
    assert find_extremes(corners, objectives) == {str(i): i for i in range(count)}
    assert find_knee(corners, objectives) == 0


def test_an_extreme_is_no_compromise_unless_there_is_nothing_else():
    three = [*UP, Objective("c", "maximize", 0.0)]
    best_in_two, other_end, between = [0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.4]
    assert find_knee([best_in_two, other_end, between], three) == 2
    assert find_knee([other_end, best_in_two], three) == 1


def test_a_difference_of_shares_has_the_published_interval():
    """Source: Newcombe 1998, table II, method 10: 56 of 70 and 48 of 80."""
    one, other = (
        estimate_mean(share, math.sqrt(share * (1 - share) / count), count, 0.0, 1.0)
        for share, count in ((0.8, 70), (0.6, 80))
    )
    found = subtract_estimates(one, other)
    assert found.mean == pytest.approx(0.2)
    # Towards the ends, limits are a little wider than Wilson's.
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=4e-3)


@pytest.mark.parametrize(("comparisons", "errors"), [(1, 1.96), (40, 3.22), (120, 3.52)])
def test_more_comparisons_ask_for_a_larger_difference(comparisons, errors):
    """Source: Sidak 1967: each of m holds at .95^(1/m)."""
    reach = errors * math.hypot(0.03, 0.04)
    low = Estimate(0.5, 0.04)
    assert is_above(Estimate(0.5 + 1.01 * reach, 0.03), low, comparisons)
    assert not is_above(Estimate(0.5 + 0.99 * reach, 0.03), low, comparisons)
