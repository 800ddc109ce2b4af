"""Successive halving by dominance: which trials continue at a rung."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.analysis import pareto
from gdpo_tune.core.trials import Objective
from gdpo_tune.tuning.halving import SuccessiveHalving, Variant
from gdpo_tune.tuning.schedulers import (
    Floats,
    compute_ranks,
    find_first,
    order_evenly,
    sum_violations,
)

TWO = (Objective("a", "maximize", 0), Objective("b", "minimize", 1))
SHARE = st.sampled_from([i / 8 for i in range(9)])
POINTS = st.lists(st.tuples(SHARE, SHARE), min_size=1, max_size=40)
EXCESS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])


def build_rungs(
    variant: Variant = "stop", factor: float = 3, constraints: int = 0
) -> SuccessiveHalving:
    return SuccessiveHalving(TWO, [10, 30], factor, variant, constraints)


def compute_positions(losses: Floats, violations: Floats) -> list[int]:
    """Compute the position of every trial front by front, in plain Python."""
    total = sum_violations(violations)
    position: dict[int, int] = {}
    for value in np.unique(total):
        rest = [row for row in range(len(losses)) if total[row] == value]
        while rest:
            front = [row for row in rest if value or not is_dominated(losses, row, rest)]
            order = order_evenly(losses[front])
            position |= {row: len(position) + int(order[i]) for i, row in enumerate(front)}
            rest = [row for row in rest if row not in front]
    return [position[row] for row in range(len(losses))]


def is_dominated(losses: Floats, row: int, others: Sequence[int]) -> bool:
    return any((losses[o] <= losses[row]).all() and (losses[o] < losses[row]).any() for o in others)


@given(POINTS)
def test_trials_on_the_front_continue_and_the_worst_third_stops(
    points: list[tuple[float, float]],
):
    core = build_rungs()
    for number, point in enumerate(points):
        verdict = core.record(number, 10, point)
        points_so_far = points[: number + 1]
        rank = pareto.rank_points(points_so_far, TWO)
        position = compute_positions(
            np.array([[-a, b] for a, b in points_so_far]), np.empty((len(points_so_far), 0))
        )[number]
        if rank[number] == 0:
            assert verdict == "continue"
        elif len(points_so_far) >= 3 and position >= len(points_so_far) * 2 / 3:
            assert verdict == "stop"
        assert (verdict == "continue") == (
            rank[number] == 0 or position < max(1, len(points_so_far) // 3)
        )


@given(st.lists(st.tuples(SHARE, SHARE, EXCESS), min_size=1, max_size=30))
def test_recording_a_rung_twice_gives_the_same_verdict(points: list[tuple[float, float, float]]):
    first, second = (build_rungs(constraints=1) for _ in range(2))
    given_first = [first.record(n, 10, p[:2], p[2:]) for n, p in enumerate(points)]
    assert [second.record(n, 10, p[:2], p[2:]) for n, p in enumerate(points)] == given_first
    # a trial that was killed between its rung and its end asks again, whatever came in since
    assert [second.record(n, 10, p[:2], p[2:]) for n, p in enumerate(points)] == given_first


@given(POINTS, st.randoms(use_true_random=False))
def test_the_last_verdict_does_not_depend_on_the_order_of_those_before(
    points: list[tuple[float, float]], random: np.random.Generator
):
    *before, last = points
    shuffled = list(before)
    random.shuffle(shuffled)
    verdicts: list[str] = []
    for earlier in (before, shuffled):
        core = build_rungs()
        for number, point in enumerate(earlier):
            core.record(number, 10, point)
        verdicts.append(core.record(len(points), 10, last))
    if last not in before:  # equal trials go by who came first
        assert verdicts[0] == verdicts[1]


@given(
    st.lists(st.tuples(SHARE, SHARE, EXCESS), min_size=1, max_size=30),
    st.sets(st.integers(0, 29), min_size=1),
    st.integers(1, 10),
)
def test_the_first_of_a_subset_equals_the_first_in_the_full_order(
    points: list[tuple[float, float, float]], chosen: set[int], room: int
):
    table = np.array(points)
    losses, violations = table[:, :2], table[:, 2:]
    candidates = np.array(sorted({row % len(points) for row in chosen}))
    positions = compute_positions(losses, violations)
    first = min(candidates, key=lambda row: positions[row])
    expected = first if positions[first] < room else None
    total = sum_violations(violations)
    assert find_first(losses, total, compute_ranks(losses, total), candidates, room) == expected


def test_a_front_is_ordered_by_its_ends_and_then_by_distance():
    front = np.array([[0.45, 0.5], [0, 1], [0.1, 0.9], [1, 0], [0.9, 0.05]])
    assert order_evenly(front).tolist() == [2, 0, 3, 1, 4]


def test_the_order_of_a_front_does_not_depend_on_units():
    front = np.array([[0.45, 0.5], [0, 1], [0.1, 0.9], [1, 0], [0.9, 0.05]])
    assert order_evenly(front * [1, 1e6]).tolist() == order_evenly(front).tolist()


def test_feasible_trials_come_first_then_the_least_violations():
    losses = np.array([[0.0, 0.0], [9.0, 9.0], [1.0, 1.0], [2.0, 2.0]])
    violations = np.array([[0.3], [-0.1], [0.1], [0.0]])
    assert compute_positions(losses, violations) == [3, 1, 2, 0]


def test_constraints_of_different_scales_count_alike():
    violations = np.array([[900.0, 0.1], [100.0, 0.2], [1000.0, 0.0]])
    # in shares of the largest: 0.9 + 0.5, 0.1 + 1, 1 + 0
    assert compute_positions(np.zeros((3, 1)), violations) == [2, 1, 0]


def test_a_trial_that_breaks_a_constraint_is_stopped_by_one_that_does_not():
    core = build_rungs(constraints=1)
    assert core.record(0, 10, (0.1, 0.9), (0.0,)) == "continue"
    assert core.record(1, 10, (0.9, 0.1), (0.2,)) == "stop"
    assert core.list_dominating(1, 10) == (0,)
    assert core.record(2, 10, (0.9, 0.1), (-0.2,)) == "continue"


def test_the_dominating_trial_of_a_stopped_trial_is_named():
    core = build_rungs()
    for number, point in enumerate([(0.5, 0.5), (0.9, 0.9), (0.6, 0.4), (0.4, 0.6)]):
        verdict = core.record(number, 10, point)
    assert verdict == "stop"
    core.record(4, 10, (0.95, 0.05))
    assert core.list_dominating(3, 10) == (0, 2)


def test_a_measurement_between_the_levels_decides_nothing():
    core = build_rungs()
    core.record(0, 10, (0.9, 0.1))
    assert core.record(1, 20, (0.1, 0.9)) == "continue"
    assert core.record(1, 10, (0.1, 0.9)) == "stop"


def test_the_reduction_factor_changes_which_trials_continue():
    points = [(0.9, 0.1), (0.1, 0.9), (0.2, 0.8), (0.8, 0.2)]
    verdicts: dict[float, str] = {}
    for factor in (1.5, 3.0):
        core = build_rungs(factor=factor)
        for number, point in enumerate(points):
            verdicts[factor] = core.record(number, 10, point)
    assert verdicts == {1.5: "continue", 3.0: "stop"}


def test_a_trial_waits_until_enough_trials_rank_behind_it():
    core = build_rungs("promote")
    assert core.record(0, 10, (0.9, 0.1)) == "continue"
    assert core.record(1, 10, (0.8, 0.2)) == "pause"
    assert core.find_promotable() is None
    for number in range(2, 6):
        assert core.record(number, 10, (0.1, 0.9)) == "pause"
        assert core.find_promotable() == (1 if number == 5 else None)
    core.promote(1)
    assert core.find_promotable() is None
    assert core.record(1, 10, (0.8, 0.2)) == "continue"
    assert core.record(1, 30, (0.8, 0.2)) == "continue"


def test_of_several_levels_the_highest_is_promoted_from_first():
    core = build_rungs("promote")
    for completions in (30, 10):
        for number in range(6):
            core.record(number + completions, completions, (0.9 - number / 10, 0.1))
    assert core.find_promotable() == 31
    core.promote(31)
    assert core.find_promotable() == 11
    core.promote(11)
    assert core.find_promotable() is None


@given(
    st.lists(st.tuples(SHARE, SHARE), min_size=5, max_size=30),
    st.integers(1, 4),
    st.sampled_from(["stop", "promote"]),
)
def test_a_slot_always_has_work(points: list[tuple[float, float]], slots: int, variant: Variant):
    """Every trial ends, is stopped or is paused, and no slot is idle while a trial can run."""
    core = SuccessiveHalving(TWO, (1, 3, 9), 3, variant)
    done: dict[int, int] = {}
    waiting: set[int] = set()
    queue, running = list(range(len(points))), list[tuple[int, int]]()
    clock = 0
    while True:
        while len(running) < slots:
            promoted = core.find_promotable()
            if promoted is not None:
                core.promote(promoted)
                waiting.remove(promoted)
                heapq.heappush(running, (clock, promoted))
            elif queue:
                heapq.heappush(running, (clock, queue.pop(0)))
            else:
                break
        if not running:
            break
        clock, number = heapq.heappop(running)
        done[number] = done.get(number, 0) + 1
        verdict = core.record(number, done[number], points[number])
        if done[number] < 27 and verdict == "continue":
            heapq.heappush(running, (clock + 1, number))
        elif verdict == "pause":
            waiting.add(number)
    assert set(done) == set(range(len(points)))
    assert 27 in done.values()
    if variant == "stop":
        assert not waiting
