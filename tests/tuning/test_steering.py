"""Steering of the searcher without Ray's processes: what requests do to trials and the plan."""

from dataclasses import replace

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import IncidentOccurred, Outlook, SweepSteered
from gdpo_tune.core.trials import Cost, Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import REQUESTS, leave_request, list_pending
from gdpo_tune.results.steering import Steering
from gdpo_tune.spec.first_trials import count_wide
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning import lifecycle
from gdpo_tune.tuning.attempts import FINISHED
from gdpo_tune.tuning.lifecycle import RequestInbox
from gdpo_tune.tuning.plan import is_finished, is_over
from gdpo_tune.tuning.retention import delete_unkept_checkpoints
from tests.support.search_driver import Driver
from tests.support.tuning import (
    build_measurement,
    build_outcome,
    is_asked_to_stop,
    load_code_spec,
    load_halving_spec,
)

QUICK = ["search.sampler=random", "search.trials=3", "search.replicates.max_runs=0"]
POINT = {"learning_rate": 1e-4, "group_size": 4}
VALUES = {"correctness": 0.4, "format": 0.4, "length": 0.4}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let the searcher look for requests whenever it can."""
    monkeypatch.setattr(lifecycle, "POLL_SECONDS", 0.0)


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path, [*QUICK, "search.scheduler={type: fifo}"])


def steer(driver, action, **arguments):
    """Send a request, let the searcher take it, and return what came of it."""
    steering = Steering(driver.searcher._ledger.directory)
    request = steering.request(action, arguments, "anna")
    driver.searcher.apply_requests()
    recorded = steering.find(request.id)
    events = [event for event in driver.events if isinstance(event, SweepSteered)]
    assert recorded is not None
    assert events[-1].request == recorded
    assert list_pending(steering.directory) == []
    return recorded


def read_planned(driver):
    """Return the trials that exist at the end, as the last outlook says."""
    return [event for event in driver.events if isinstance(event, Outlook)][-1].planned


def start_all(driver):
    names = []
    while (name := driver.ask()) not in (None, FINISHED):
        names.append(name)
    return names


def end_all(driver):
    for name in list(driver.in_flight):
        driver.end(name)


def list_running(driver):
    return [config.directory.name for config in driver.in_flight.values()]


def has_flag(ledger, number):
    return is_asked_to_stop(ledger.get_trial_directory(number))


def test_a_running_trial_is_told_to_end_and_is_pruned(ledger, driver):
    _, name = start_all(driver)
    assert steer(driver, "stop", trial=1).reason == "trial 1 ends at its next step"
    assert (has_flag(ledger, 0), has_flag(ledger, 1)) == (False, True)
    assert ledger.get_record(1).state == "running"
    with pytest.raises(UsageError, match="trial 1 is stopped by anna already"):
        steer(driver, "stop", trial=1)
    driver.report(name, build_measurement(20, **VALUES))
    driver.end(name, interrupted=True)
    record = ledger.get_record(1)
    assert (record.state, record.reason) == ("pruned", "stopped by anna")
    assert record.cost.completions == 20 * 64  # what it has used counts in the budget
    assert not has_flag(ledger, 1)
    driver.run()
    assert is_finished(ledger.spec, ledger.get_records())


def test_a_trial_that_ends_by_itself_before_it_is_stopped_keeps_its_result(ledger, driver):
    _, name = start_all(driver)
    steer(driver, "stop", trial=1)
    driver.end(name)
    assert ledger.get_record(1).state == "complete"
    assert not has_flag(ledger, 1)


def test_a_stop_survives_a_kill_before_the_trial_has_ended(spec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        start_all(driver)
        steer(driver, "stop", trial=1)
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        assert ledger.get_record(1).reason == "stopped by anna"
        assert start_all(driver)
        assert list_running(driver) == ["0", "2"]
        assert not has_flag(ledger, 1)
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        steer(driver, "stop", trial=2)  # unfinished, without a process yet
        assert ledger.get_record(2).state == "pruned"
        assert start_all(driver)
        assert list_running(driver) == ["0", "3"]


def test_a_divided_budget_takes_no_number_of_trials_and_a_waiting_trial_can_be_stopped(tmp_path):
    with Ledger.open(load_halving_spec(tmp_path, 1400, "search.sampler=random")) as ledger:
        driver = Driver(ledger, slots=1)
        driver.end(driver.ask())
        for number in (1, 2):
            name = driver.ask()
            driver.report(name, build_measurement(26, **VALUES))
            driver.end(name, interrupted=True)
            assert ledger.get_record(number).state == "paused"
        with pytest.raises(UsageError, match="give it a larger budget, with: budget"):
            steer(driver, "trials", number=40)
        assert steer(driver, "stop", trial=1).reason == "trial 1 ends"
        assert ledger.get_record(1).reason == "stopped by anna"
        assert driver.in_flight[driver.ask()].directory.name == "3"
        assert ledger.get_record(1).state == "pruned"


def test_an_added_configuration_runs_next_and_on_top_of_the_others(ledger, driver):
    names = start_all(driver)
    request = steer(driver, "add", params=POINT)
    assert read_planned(driver) == 2 + 3 + 1
    driver.end(names[0])
    driver.ask()
    added = ledger.get_record(2)
    assert {name: added.params[name] for name in POINT} == POINT
    assert (added.role, added.proposer, added.request) == ("search", "enqueued", request.id)
    driver.run()
    records = ledger.get_records()
    assert sum(record.role == "search" for record in records) == 3 + 1
    assert is_finished(ledger.spec, records, added=ledger.steering.list_waiting(records))


def test_an_added_configuration_runs_once_whatever_is_killed(spec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        start_all(driver)
        request = steer(driver, "add", params=POINT)
    for _ in range(2):
        with Ledger.open(spec) as ledger:
            start_all(driver := Driver(ledger, slots=3))
            assert [r.number for r in ledger.get_records() if r.request == request.id] == [2]
    with Ledger.open(spec) as ledger:
        Driver(ledger).run()
        assert sum(r.request == request.id for r in ledger.get_records()) == 1


def test_a_clone_differs_in_the_changes_alone(ledger, driver):
    start_all(driver)
    end_all(driver)
    steer(driver, "clone", trial=1, changes={"learning_rate": 2e-4})
    driver.ask()
    source, clone = ledger.get_record(1), ledger.get_record(2)
    assert {**source.params, "learning_rate": 2e-4} == clone.params


def end_with_policy(driver, name, step=60, value=0.4):
    """End a trial with a policy on disk; a training has been measured at its last step."""
    config = driver.in_flight[name]
    values = dict.fromkeys(VALUES, value)
    if config.train:
        driver.report(name, build_measurement(step, **values))
    kept = write_checkpoint(config.directory, step, Cost(), lambda directory: None).path
    driver.end(name, outcome=replace(build_outcome(**values), checkpoint=kept))


def test_a_merge_runs_next_is_tested_and_stays_whatever_it_is_worth(spec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        while len(ledger.get_records()) < 4:
            for name in start_all(driver):
                end_with_policy(driver, name)
        request = steer(driver, "merge", weights={"2": 0.5, "3": 0.5})
        name = driver.ask()
        merge = ledger.get_records()[-1]
        assert (merge.role, merge.request) == ("merge", request.id)
        assert merge.parts == (Part(2, 60, 0.5), Part(3, 60, 0.5))
        assert read_planned(driver) == 2 + 3 + 1
        parts = [part.checkpoint for part in driver.in_flight[name].parts]
        assert parts == [ledger.get_checkpoint(number, 60) for number in (2, 3)]
        # on validation prompts it is dominated, for which a merge of the sweep's own would end
        driver.report(name, build_measurement(0, Cost(), correctness=0, format=0, length=0))
        assert not has_flag(ledger, merge.number)
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        assert ledger.get_record(merge.number).state == "running", "a kill does not end it"
        for name in start_all(driver):
            if driver.in_flight[name].directory.name == str(merge.number):
                end_with_policy(driver, name, 0, 0.0)
        driver.run()
        delete_unkept_checkpoints(ledger)
        record = ledger.get_record(merge.number)
        assert record.state == "complete"
        assert record.checkpoint is not None
        assert all(ledger.get_checkpoint(part.trial, part.step).is_dir() for part in record.parts)


def test_a_finished_sweep_runs_the_merge_alone_although_its_hours_are_spent(tmp_path):
    spec = load_code_spec(tmp_path, [*QUICK, "search.patience=2", "search.merges.budget=20"])
    with Ledger.open(spec) as ledger:
        driver, records = Driver(ledger, slots=1), []
        while not is_over(ledger.spec, records):
            if (name := driver.ask()) not in (None, FINISHED):
                if driver.in_flight[name].train:
                    end_with_policy(driver, name)
                else:
                    driver.end(name)
            records = ledger.get_records()
        steer(driver, "budget", hours=1e-9)
        trainings = [record.number for record in records if record.is_training][:2]
        steer(driver, "merge", weights={str(number): 0.5 for number in trainings})
        name = driver.ask()
        assert is_over(ledger.spec, ledger.get_records()), "but for the merge"
        driver.end(name, outcome=build_outcome(0.9, 0.9, 0.9))
        assert len(ledger.get_records()) == len(records) + 1
        steer(driver, "budget", hours=0)
        assert driver.ask() == FINISHED, "it plans nothing by the merge"


def test_more_trials_run_and_fewer_or_a_spent_budget_end_the_search(ledger):
    driver = Driver(ledger, slots=1)
    for _ in range(3):
        driver.end(driver.ask())
    steer(driver, "trials", number=5)
    assert read_planned(driver) == 2 + 5
    driver.end(driver.ask())
    steer(driver, "trials", number=2)
    assert driver.ask() == FINISHED
    assert sum(record.role == "search" for record in ledger.get_records()) == 2
    steer(driver, "trials", number=5)
    steer(driver, "budget", completions=4 * 640)
    assert driver.ask() == FINISHED
    assert ledger.spec.search.budget.completions == 2560


def test_the_sampler_is_that_of_a_new_process_after_a_change(tmp_path):
    spec = load_code_spec(tmp_path, ["search.trials=3", "search.replicates.max_runs=0"])
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=4)  # as many as trials: none can learn from another
        assert driver.searcher._proposals._view.sampler.value == "qmc"
        steer(driver, "trials", number=20)
        assert driver.searcher._proposals._view.sampler.value == "gp"
        driver.searcher.close()


def test_a_paused_sweep_starts_nothing_until_it_is_resumed(spec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        first, second = start_all(driver)
        steer(driver, "pause")
        assert driver.events[-1].pause.author == "anna"
        driver.end(first)
        assert driver.ask() is None
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        (second,) = start_all(driver)  # what a kill has interrupted ends
        driver.end(second)
        assert [driver.ask() for _ in range(3)] == [None] * 3  # not FINISHED
        steer(driver, "resume")
        assert driver.events[-1].pause is None
        driver.run()
        assert is_finished(ledger.spec, ledger.get_records())


def test_a_paused_sweep_without_anything_left_to_run_finishes(ledger, driver):
    names = []
    while len(ledger.get_records()) < 5:
        names += start_all(driver)
        driver.end(names.pop(0))
    steer(driver, "pause")
    end_all(driver)
    assert driver.ask() == FINISHED


def test_no_waiting_training_goes_on_while_the_sweep_is_paused(tmp_path):
    spec = load_halving_spec(tmp_path, 1400, "search.sampler=random", "search.merges.budget=0")
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=1)
        driver.end(driver.ask())
        for _ in range(1 + count_wide(spec)):
            driver.report(name := driver.ask(), build_measurement(26, **VALUES))
            driver.end(name, interrupted=True)
        steer(driver, "pause")
        assert driver.ask() is None
        steer(driver, "resume")
        assert driver.in_flight[driver.ask()].directory.name == "1"


def test_a_request_just_before_the_end_keeps_the_sweep_going(ledger, driver, monkeypatch):
    while len(ledger.get_records()) < 5 or driver.in_flight:
        start_all(driver)
        end_all(driver)
    monkeypatch.setattr(lifecycle, "POLL_SECONDS", 3600.0)
    Steering(ledger.directory).request("trials", {"number": 4})
    assert driver.ask() is None
    assert isinstance(driver.ask(), str)
    assert len(ledger.get_records()) == 6


def test_a_request_that_has_become_impossible_is_recorded_as_refused(ledger, driver):
    names, steering = start_all(driver), Steering(ledger.directory)
    request = steering.request("stop", {"trial": 1}, "anna")
    driver.end(names[1])
    driver.searcher.apply_requests()
    recorded = steering.find(request.id)
    assert (recorded.outcome, recorded.reason) == ("refused", "trial 1 has ended already: complete")


def test_a_file_of_a_recorded_request_is_removed_and_not_applied_again(ledger, driver):
    recorded = steer(driver, "trials", number=5)
    steer(driver, "trials", number=6)
    leave_request(ledger.directory, recorded)  # as if the driver was killed before it removed it
    driver.searcher.apply_requests()
    assert len(ledger.get_requests()) == 2
    assert ledger.spec.search.trials == 6
    assert list_pending(ledger.directory) == []


def test_a_foreign_file_is_set_aside_with_an_incident(ledger, driver):
    ledger.begin_session(0.0, 2, {})
    (ledger.directory / REQUESTS).mkdir()
    (ledger.directory / REQUESTS / "notes.txt").write_text("stop 7, please")
    steer(driver, "pause")  # what follows it is applied
    (incident,) = [e.incident for e in driver.events if isinstance(e, IncidentOccurred)]
    assert "notes.txt in requests/ is no request" in str(incident)
    assert (ledger.directory / REQUESTS / "damaged" / "notes.txt").exists()
    assert ledger.get_sessions()[-1]["incidents"] == [incident]


def test_the_driver_looks_for_requests_once_a_second(ledger, monkeypatch):
    monkeypatch.setattr(lifecycle, "POLL_SECONDS", 1.0)
    now = [100.0]
    inbox = RequestInbox(ledger, lambda: now[-1])
    assert inbox.is_due()
    assert list(inbox.take()) == []
    now.append(100.5)
    assert not inbox.is_due()
    now.append(101.0)
    assert inbox.is_due()


def test_a_replay_of_the_requests_gives_the_same_sweep(spec, ledger, driver):
    start_all(driver)
    steer(driver, "stop", trial=1)
    steer(driver, "add", params=POINT)
    steer(driver, "trials", number=4)
    steer(driver, "pause")
    assert sum(isinstance(event, SweepSteered) for event in driver.events) == 4
    with Ledger.open(spec, read_only=True) as reader:
        assert (reader.steering, reader.spec) == (ledger.steering, ledger.spec)
