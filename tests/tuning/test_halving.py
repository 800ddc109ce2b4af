"""Successive halving by dominance: which trials continue at a rung, also in a new process."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gdpo_tune.analysis import pareto
from gdpo_tune.core.trials import Objective
from gdpo_tune.tuning import halving as module
from gdpo_tune.tuning import schedulers
from gdpo_tune.tuning.halving import SuccessiveHalving, Variant
from gdpo_tune.tuning.schedulers import (
    Floats,
    Ranks,
    compute_ranks,
    find_first,
    order_evenly,
    sum_violations,
    update_ranks,
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


OBJECTIVES = tuple(Objective(name, "maximize", 0) for name in "abc")
LEVELS = (10, 30)


class History:
    """Trials in the order of their recording at one level: values, violations, and open trials."""

    def __init__(self, seed: int, trials: int, open_trials: int) -> None:
        rng = np.random.default_rng(seed)
        self.values = np.round(rng.normal(size=(trials, 3)), 1)  # so that some are equal
        self.violations = np.round(rng.normal(-1, 1, size=(trials, 1)), 1)
        self.open = {int(number) for number in rng.permutation(trials)[:open_trials]}

    def record(self, core: SuccessiveHalving, number: int) -> str:
        return core.record(
            number, 10, self.values[number].tolist(), self.violations[number].tolist()
        )

    def recall(self, core: SuccessiveHalving, number: int) -> None:
        core.replay(number, 10, self.values[number].tolist(), self.violations[number].tolist())

    def rebuild(self, variant: Variant, until: int) -> SuccessiveHalving:
        core = SuccessiveHalving(OBJECTIVES, LEVELS, 3, variant, 1)
        for number in range(until):
            if number in self.open:
                self.record(core, number)
            else:
                self.recall(core, number)
        return core


@pytest.mark.parametrize("variant", get_args(Variant))
@pytest.mark.parametrize("seed", range(10))
def test_rebuilt_rungs_make_the_same_decisions(seed: int, variant: Variant):
    history = History(seed, 300, open_trials=[1, 20, 200][seed % 3])
    lost, killed_at = SuccessiveHalving(OBJECTIVES, LEVELS, 3, variant, 1), 200
    verdicts = [history.record(lost, number) for number in range(killed_at)]
    for number in set(range(killed_at)) - history.open:
        lost.promote(number)  # it has ended, so it does not wait
    core = history.rebuild(variant, killed_at)
    for number in history.open & set(range(killed_at)):
        assert history.record(core, number) == verdicts[number]
    for number in range(killed_at, 300):
        assert history.record(core, number) == history.record(lost, number)
        assert core.list_dominating(number, 10) == lost.list_dominating(number, 10)
        promoted = lost.find_promotable()
        assert core.find_promotable() == promoted
        if promoted is not None:
            core.promote(promoted)
            lost.promote(promoted)


def test_an_ended_trial_is_never_promoted():
    core = SuccessiveHalving(OBJECTIVES, LEVELS, 3, "promote")
    for number in range(9):
        core.replay(number, 10, [1 - number / 10] * 3)
    core.replay(0, 20, [1.0] * 3)  # no level: nobody is compared there
    assert core.find_promotable() is None
    assert core.record(9, 10, [0.0] * 3) == "pause"
    assert core.list_dominating(9, 10) == tuple(range(9))
    assert core.find_promotable() is None


@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_incremental_ranks_equal_ranks_from_a_full_sort(objectives: int):
    rng = np.random.default_rng(objectives)
    points = rng.integers(0, 6, size=(120, objectives)).astype(float)
    total = np.where(rng.random(120) < 0.2, rng.random(120), 0)
    rank = np.zeros(120, dtype=np.int64)
    for end in range(1, 121):
        update_ranks(points[:end], total[:end], rank[:end])
        assert rank[:end].tolist() == compute_ranks(points[:end], total[:end]).tolist()
    assert rank.tolist() == rank_plainly(points, total)


def rank_plainly(points: Floats, total: Floats) -> list[int]:
    """Rank points front by front, in plain Python."""
    rank = [0] * len(points)
    rest, front = [row for row in range(len(points)) if total[row] == 0], 0
    while rest:
        first = [
            row for row in rest if not any(is_dominating(points[o], points[row]) for o in rest)
        ]
        for row in first:
            rank[row] = front
        rest, front = [row for row in rest if row not in first], front + 1
    return rank


def is_dominating(one: Floats, other: Floats) -> bool:
    return bool((one <= other).all() and (one < other).any())


class WorkCounter:
    """Counts of compared trials and of newly ranked trials."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compared = self.pairs = self.ranked = 0
        dominating, some_dominating = schedulers.find_dominating, schedulers.find_dominated

        def counted(losses: Floats, total: Floats, row: int) -> NDArray[np.bool_]:
            self.compared += len(losses)
            return dominating(losses, total, row)

        def counted_pairs(some: Floats, others: Floats) -> NDArray[np.bool_]:
            self.pairs += len(some) * len(others)
            return some_dominating(some, others)

        def counted_ranks(losses: Floats, total: Floats) -> Ranks:
            self.ranked += len(losses)
            return compute_ranks(losses, total)

        for owner in (schedulers, module):
            monkeypatch.setattr(owner, "find_dominating", counted)
        monkeypatch.setattr(schedulers, "find_dominated", counted_pairs)
        monkeypatch.setattr(module, "compute_ranks", counted_ranks)


@pytest.mark.parametrize("variant", get_args(Variant))
def test_the_work_of_rebuilding_is_linear_in_ended_trials(
    monkeypatch: pytest.MonkeyPatch, variant: Variant
):
    """Both have equally many open trials; repeating all decisions would take 16 times the work."""
    work_done: list[float] = []
    for trials in (500, 2000):
        work, history = WorkCounter(monkeypatch), History(0, trials, 0)
        history.open = set(range(trials - 20, trials))
        history.rebuild(variant, trials)
        assert 0 < work.ranked < trials
        work_done.append(work.compared + work.pairs)
        monkeypatch.undo()
    assert 2 < work_done[1] / work_done[0] < 6


def test_a_verdict_does_not_rank_all_trials_anew(monkeypatch: pytest.MonkeyPatch):
    work, history = WorkCounter(monkeypatch), History(0, 1000, open_trials=1000)
    history.rebuild("promote", 1000)
    assert work.ranked < 200
    everyone = 1000 * 1000 / 2
    assert work.compared < 3 * everyone, "each at most three times with those before it"
    assert work.pairs < everyone
