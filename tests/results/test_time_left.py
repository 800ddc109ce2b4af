"""The time left of a sweep, from the work of its trials and the steps of those that run."""

from dataclasses import replace

import pytest

from gdpo_tune.core.trials import EVALUATED_WORK, Cost
from gdpo_tune.results.live import (
    LEAST_SHARE,
    RateLimited,
    estimate_seconds_left,
    measure_work,
)
from tests.support.analysis import build_trial


def test_work_counts_training_evaluations_and_what_runs():
    ended = replace(build_trial(0, 0, 0), cost=Cost(completions=640, evaluation_completions=100))
    running = replace(build_trial(1, 0, 0, state="running"), cost=Cost(completions=64))
    done = measure_work([ended, running], {1: Cost(completions=192)})
    assert done == pytest.approx(640 + EVALUATED_WORK * 100 + 192)


def test_the_time_left_follows_from_the_pace_of_this_session():
    assert estimate_seconds_left(1000.0, 500.0, 50.0) == pytest.approx(100.0)
    assert estimate_seconds_left(1000.0, 1000.0 * LEAST_SHARE, 50.0) is None
    assert estimate_seconds_left(-20.0, 500.0, 50.0) == 0.0


def test_a_value_is_made_again_after_its_share_of_the_time():
    times = iter([10.0, 12.0, 17.9, 18.0])
    value = RateLimited(3.0, clock=lambda: next(times))
    assert value.make(lambda: 7) == 7  # in 2 s, so again 6 s after 12
    assert [value.is_due, value.is_due] == [False, True]
