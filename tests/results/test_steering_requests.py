"""`Steering`: which sweeps can be steered, and what a person is told."""

import shutil
import threading
import time

import pytest

from gdpo_tune import load_sweep
from gdpo_tune.core.errors import UsageError
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import find_user, list_pending
from gdpo_tune.results.steering import Steering
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.lifecycle import RequestInbox
from tests.support.tuning import build_outcome, load_code_spec


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path)


@pytest.fixture
def ledger(spec):
    """The ledger of a sweep with a running trial, as its driver has it."""
    with Ledger.open(spec) as ledger:
        ledger.begin_session(time.time(), 2, {})
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=0)
        yield ledger


@pytest.fixture
def steering(ledger):
    return Steering(ledger.directory)


def test_a_request_is_taken_by_the_driver_and_found_by_its_id(ledger, steering):
    assert steering.is_running
    request = steering.request("stop", {"trial": 0})
    assert request.author == find_user()
    assert steering.list_pending() == [request]
    assert steering.find(request.id) is None
    assert steering.wait(request.id, 0.3) is None
    driver = threading.Timer(0.3, lambda: list(RequestInbox(ledger).take()))
    driver.start()
    recorded = steering.wait(request.id, 10)
    driver.join()
    assert recorded is not None
    assert (recorded.author, recorded.asked) == (request.author, request.asked)
    assert recorded.applied >= request.asked
    assert steering.list_requests() == [recorded]
    assert steering.list_pending() == []


def test_a_sweep_is_found_by_directory_file_name_and_notebook(ledger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = ledger.directory
    for target in (directory, str(directory), directory / "spec.yaml"):
        assert Steering(target).directory == directory
    assert load_sweep(str(directory)).steer.directory == directory
    copy = shutil.copytree(directory, tmp_path / "copy")
    assert Steering(copy / "spec.yaml").directory == copy, "its file is no file to search with"


def test_an_unknown_sweep_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nosuch: there is no sweep in nosuch"):
        Steering("nosuch")
    with pytest.raises(UsageError, match="there is no sweep in"):
        Steering(tmp_path)


def test_a_finished_sweep_is_refused_with_the_way_to_extend_it(ledger, spec):
    ledger.complete(0, build_outcome())
    ledger.end_session(ledger.begin_session(time.time(), 2, {}), "all 16 configurations were tried")
    ledger.close()
    steering = Steering(spec.directory)
    for action, arguments in [("pause", {}), ("trials", {"number": 24}), ("stop", {"trial": 0})]:
        with pytest.raises(UsageError, match=r"has finished \(all 16 .*, so nothing") as caught:
            steering.request(action, arguments)
        assert "search.trials=24" in str(caught.value)
    assert list_pending(spec.directory) == []


def test_a_sweep_that_does_not_run_keeps_requests_for_its_next_start(ledger, spec):
    ledger.close()
    steering = Steering(spec.directory)
    assert not steering.is_running
    with pytest.raises(UsageError, match=r"no process works on .*, so no trial runs that could"):
        steering.request("stop", {"trial": 0})
    request = steering.request("trials", {"number": 24})
    with pytest.raises(UsageError, match=r"search\.trials is 24 already"):
        steering.request("trials", {"number": 24})  # although nobody has recorded the first one
    assert steering.list_pending() == [request]


def test_a_second_request_sees_the_first_one_that_still_waits(ledger, steering):
    steering.request("pause", {}, "anna")
    with pytest.raises(UsageError, match="the sweep is paused already, by anna"):
        steering.request("pause", {}, "ben")
    steering.request("resume", {}, "ben")
    assert [request.action for request in steering.list_pending()] == ["pause", "resume"]
    assert steering.pause is None
    list(RequestInbox(ledger).take())
    assert steering.pause is None
    steering.request("pause", {}, "anna")
    list(RequestInbox(ledger).take())
    assert steering.pause is not None
    assert steering.pause.author == "anna"


def test_the_sweep_of_another_user_is_refused(ledger, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match="and you may not write there"):
        Steering(ledger.directory).request("pause", {})


def test_a_sweep_on_an_object_store_is_steered_where_it_runs(ledger, monkeypatch):
    steering = Steering(ledger.directory)
    request = steering.request("pause", {})
    with monkeypatch.context() as running:
        running.setattr(SweepSpec, "address", "s3://bucket/sweep")
        steering._check_sweep(ledger, request)  # its process is on this machine
    spec = ledger.spec
    ledger.close()
    with Ledger.open(spec, read_only=True) as closed:
        monkeypatch.setattr(SweepSpec, "address", "s3://bucket/sweep")
        with pytest.raises(UsageError, match="s3://bucket/sweep is on an object store, and no"):
            steering._check_sweep(closed, request)
