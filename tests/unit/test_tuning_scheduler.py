"""Which of Ray's trials is next."""

from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial

from gdpo_tune.tuning.schedulers.base import Scheduler

NO_CONTROLLER: Any = None


def trial(status: str = Trial.PENDING) -> Any:
    stands_for = SimpleNamespace(status=status)
    stands_for.is_finished = lambda: stands_for.status in (Trial.TERMINATED, Trial.ERROR)
    return stands_for


def test_the_first_that_waits_is_next() -> None:
    scheduler = Scheduler()
    running, first, second = trial(Trial.RUNNING), trial(), trial()
    for one in (running, first, second):
        scheduler.on_trial_add(NO_CONTROLLER, one)
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is first
    first.status = Trial.RUNNING
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is second
    second.status = Trial.TERMINATED
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is None


def test_a_trial_whose_process_died_is_chosen_again() -> None:
    scheduler = Scheduler()
    one = trial()
    scheduler.on_trial_add(NO_CONTROLLER, one)
    one.status = Trial.RUNNING
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is None
    one.status = Trial.PENDING
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is one


def test_what_has_ended_is_not_looked_at_again() -> None:
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return True

    scheduler = Scheduler()
    for _ in range(100):
        scheduler.on_trial_add(
            NO_CONTROLLER, SimpleNamespace(status=Trial.TERMINATED, is_finished=look)
        )
    for _ in range(10):
        scheduler.choose_trial_to_run(NO_CONTROLLER)
    assert looks == 100
