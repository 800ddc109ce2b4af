"""Rungs that are rebuilt when a sweep resumes: same decisions, without repeating each of them."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from gdpo_tune.core.trials import Objective
from gdpo_tune.tuning import halving as module
from gdpo_tune.tuning import schedulers
from gdpo_tune.tuning.halving import SuccessiveHalving, Variant
from gdpo_tune.tuning.schedulers import Floats, Ranks, compute_ranks, update_ranks

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
        assert rank[:end].tolist() == rank_plainly(points[:end], total[:end])
    assert compute_ranks(points, total).tolist() == rank.tolist()


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
