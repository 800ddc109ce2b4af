"""The time left of a sweep, from the trials that ended and the steps of those that run."""

import pytest

from gdpo_tune.core.trials import Part
from gdpo_tune.results.live import (
    EVALUATION,
    estimate_seconds_left,
    measure_planned_work,
    measure_work_done,
)
from tests.support.analysis import build_trial


def test_work_counts_trainings_evaluations_and_shares_of_running_trials():
    states = {"complete": (), "failed": (), "pruned": (Part(0, 60, 1.0),), "running": ()}
    records = [build_trial(0, 0, 0, state=s, parts=parts) for s, parts in states.items()]
    done = measure_work_done(records, {3: 15, 4: 99}, steps=60)
    assert done == pytest.approx(2 + EVALUATION + 0.25 + 1)


def test_the_time_left_follows_from_the_pace_of_this_session():
    work = measure_planned_work(planned=20, candidates=10)
    assert work == pytest.approx(10 + 10 * EVALUATION)
    assert estimate_seconds_left(work, 6.0, 1.0, 50.0) == pytest.approx((work - 6) * 10)
    assert estimate_seconds_left(work, 1.05, 1.0, 50.0) is None
    assert estimate_seconds_left(work, 30.0, 1.0, 50.0) == 0.0
