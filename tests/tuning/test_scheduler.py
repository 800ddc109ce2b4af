"""The choice of Ray's next trial."""

from typing import Any

from ray.tune.experiment import Trial

from gdpo_tune.tuning.schedulers.base import Scheduler

NO_CONTROLLER: Any = None
NO_LEDGER: Any = None


class FakeTrial:
    """A fake of Ray's trial that counts the reads of its status."""

    def __init__(self, status: str = Trial.PENDING) -> None:
        self.state = status
        self.reads = 0

    @property
    def status(self) -> str:
        self.reads += 1
        return self.state


def test_the_first_waiting_trial_is_next() -> None:
    scheduler = Scheduler(NO_LEDGER)
    running, first, second = FakeTrial(Trial.RUNNING), FakeTrial(), FakeTrial()
    for one in (running, first, second):
        scheduler.on_trial_add(NO_CONTROLLER, one)
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is first
    first.state = Trial.RUNNING
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is second
    second.state = Trial.TERMINATED
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is None


def test_a_trial_whose_process_died_is_chosen_again() -> None:
    scheduler = Scheduler(NO_LEDGER)
    one = FakeTrial()
    scheduler.on_trial_add(NO_CONTROLLER, one)
    one.state = Trial.RUNNING
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is None
    one.state = Trial.PENDING
    scheduler.on_trial_add(NO_CONTROLLER, one)  # as Ray does with what it puts back
    assert scheduler.choose_trial_to_run(NO_CONTROLLER) is one


def test_running_and_ended_trials_are_not_read_again() -> None:
    scheduler = Scheduler(NO_LEDGER)
    trials = [FakeTrial(status) for status in (Trial.RUNNING, Trial.TERMINATED) * 50]
    for one in trials:
        scheduler.on_trial_add(NO_CONTROLLER, one)
    for _ in range(10):
        scheduler.choose_trial_to_run(NO_CONTROLLER)
    assert [one.reads for one in trials] == [1] * 100
