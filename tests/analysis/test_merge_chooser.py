"""The choice of the merge that best meets a wish."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gdpo_tune.analysis.merge_choice import Aim, Merge, MergeChooser, list_mixtures, read_merge
from gdpo_tune.core.metrics import Condition
from gdpo_tune.core.trials import Objective, TrialRecord
from tests.support.analysis import GOALS, build_merge, build_trial

A, B, C = (0, 60), (1, 60), (2, 60)


def evaluate(record: TrialRecord, mixture) -> Merge:
    return read_merge(record, mixture, GOALS)


def build_policies(*values: tuple[float, float], se: float = 0.001) -> list[Merge]:
    return [evaluate(build_trial(n, *v, se=se), {(n, 60): 1.0}) for n, v in enumerate(values)]


def build_chooser(
    *limits: Condition, values=((0.9, 0.1), (0.1, 0.9)), prefer=(1.0, 0.0), merges=()
) -> MergeChooser:
    parents = build_policies(*values)
    return MergeChooser(Aim(GOALS, tuple(limits), prefer), parents, [*parents, *merges])


def choose(chooser: MergeChooser, *evaluated: Merge):
    chosen = replace(chooser, known=[*chooser.known, *evaluated]).choose_next(3)
    assert chosen is not None
    return chosen


def measure(mixture, a: float, b: float, se: float = 0.005) -> Merge:
    return evaluate(build_merge(9, a, b, se=se), mixture)


def test_mixtures_have_weights_above_0_that_sum_to_1():
    mixtures = list_mixtures([A, B, C], 3)
    assert len(mixtures) == 3 * 19 + 36
    assert all(min(m.values()) > 0 and sum(m.values()) == pytest.approx(1) for m in mixtures)
    done = [frozenset({(A, 0.5), (B, 0.5)})]
    assert len(list_mixtures([A, B, C], 3, done)) == len(mixtures) - 1
    assert {len(m) for m in list_mixtures([A, B, C], 2)} == {2}
    assert list_mixtures([A], 3) == []


def test_the_choice_keeps_a_floor_and_gives_up_no_more_than_it_has_to():
    floor = Condition("b", ">=", 0.6)
    found, is_hopeful = choose(build_chooser(floor))
    assert is_hopeful
    assert -found.losses[1] >= 0.6, "more likely kept than not"
    assert 0.3 <= found.mixture[A] <= 0.5
    lower, _ = choose(build_chooser(Condition("b", ">=", 0.3)))
    assert lower.mixture[A] > found.mixture[A]


def test_the_error_of_what_is_preferred_is_that_of_independent_metrics():
    """Of a weighted sum of normal draws, which have the same mean and deviation."""
    chooser = build_chooser(values=((0.9, 0.1), (0.4, 0.9)), prefer=(3.0, 1.0))
    losses, errors = np.array([-0.7, -0.3]), np.array([0.2, 0.4])
    value, error = chooser._compute_preferred(losses[None], errors[None])
    draws = np.random.default_rng(0).normal(losses, errors, (200_000, 2))
    sums = -draws @ [0.75 / 0.5, 0.25 / 0.8]  # spans are 0.5 and 0.8
    assert value == pytest.approx(sums.mean(), rel=0.01)
    assert error == pytest.approx(sums.std(), rel=0.01)


def test_a_ceiling_of_a_minimised_metric_is_kept():
    goals = (GOALS[0], Objective("b", "minimize", 1.0))
    parents = [
        read_merge(build_trial(n, *v, se=0.001), {(n, 60): 1.0}, goals)
        for n, v in enumerate([(0.9, 0.9), (0.1, 0.1)])
    ]
    aim = Aim(goals, (Condition("b", "<=", 0.4),), (1.0, 0.0))
    found, is_hopeful = choose(MergeChooser(aim, parents, parents))
    assert is_hopeful
    assert found.losses[1] <= 0.4
    assert found.mixture[(1, 60)] > 0.5


def test_preferences_move_the_choice_along_the_front():
    values = ((0.9, 0.1), (0.65, 0.65), (0.1, 0.9))
    shares = []
    for weight in (5.0, 1.0, 0.2):
        found, _ = choose(build_chooser(values=values, prefer=(weight, 1.0)))
        shares.append(found.losses[1] - found.losses[0])
    assert shares == sorted(shares, reverse=True)


def test_an_evaluation_corrects_the_next_choice():
    floor = Condition("b", ">=", 0.6)
    chooser = build_chooser(floor)
    first, _ = choose(chooser)
    fell_short = measure(first.mixture, -first.losses[0], 0.45)
    second, _ = choose(chooser, fell_short)
    assert second.mixture[B] > first.mixture[B]
    exceeded = measure(first.mixture, -first.losses[0], 0.85)
    third, _ = choose(chooser, exceeded)
    assert third.mixture[A] > first.mixture[A]


def test_a_merge_of_the_sweep_corrects_the_first_choice():
    floor = Condition("b", ">=", 0.6)
    low = measure({A: 0.5, B: 0.5}, 0.5, 0.3)
    found, _ = choose(build_chooser(floor, merges=[low]))
    assert found.mixture[B] > choose(build_chooser(floor))[0].mixture[B]


def test_nothing_is_chosen_twice():
    chooser, evaluated = build_chooser(prefer=(1.0, 1.0)), []
    for _ in range(19):
        found, _ = choose(chooser, *evaluated)
        evaluated.append(measure(found.mixture, *-found.losses))
    assert len({entry.mixture[A] for entry in evaluated}) == 19
    assert replace(chooser, known=[*chooser.known, *evaluated]).choose_next(3) is None


def test_a_wish_beyond_reach_gives_the_closest_merge():
    found, is_hopeful = choose(build_chooser(Condition("b", ">=", 1.5)))
    assert not is_hopeful
    assert found.mixture == {A: 0.05, B: 0.95}
