"""A sampler that works in another thread than the loop: its records and its proposals."""

import threading
import time
from unittest.mock import Mock

import pytest

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning import proposals
from gdpo_tune.tuning.proposals import Proposals, SamplerView, Suggestion
from tests.support.search_driver import Driver
from tests.support.tuning import load_code_spec


class SlowView:
    """Proposes its number of records; blocks until the test releases it."""

    def __init__(self):
        self.numbers, self.proposals = [], 0
        self.go = threading.Semaphore(0)

    @property
    def record_count(self):
        return len(self.numbers)

    def observe(self, record):
        self.numbers.append(record.number)

    def propose(self):
        knew = self.record_count
        self.proposals += 1
        assert self.go.acquire(timeout=60)
        return Suggestion({"knew": knew}, "model")


@pytest.fixture
def slow():
    return SlowView()


@pytest.fixture
def asking(slow, monkeypatch):
    monkeypatch.setattr(proposals, "BUSY_WAIT_SECONDS", 0.001)
    created = Proposals(slow)
    yield created
    slow.go.release(3)
    created.close()


def build_record(number):
    return TrialRecord(number, "search", "complete", {}, number, "model")


def wait(asking, idle=False):
    """Poll until there is a suggestion; return how many records it knew."""
    while (suggestion := asking.poll(idle=idle)) is None:
        time.sleep(0.001)
    return suggestion.params["knew"]


def test_the_loop_goes_on_until_the_sampler_is_done(slow, asking):
    assert [asking.poll(idle=False) for _ in range(3)] == [None] * 3
    assert slow.proposals == 1
    slow.go.release()
    assert wait(asking) == 0


def test_results_that_arrive_during_a_proposal_reach_it(slow, asking):
    assert asking.poll(idle=False) is None
    asking.observe(build_record(0))
    slow.go.release(2)
    assert wait(asking) == 1


def test_quick_results_do_not_starve_a_slow_sampler(slow, asking):
    assert asking.poll(idle=False) is None
    asking.observe(build_record(0))
    slow.go.release()
    while slow.proposals < 2:
        assert asking.poll(idle=False) is None
    asking.observe(build_record(1))
    slow.go.release()
    assert wait(asking) == 1
    assert slow.numbers == [0, 1]
    # and the next proposal knows all
    slow.go.release()
    assert wait(asking) == 2


def test_few_results_after_many_wait_for_the_next_proposal(slow, asking):
    slow.numbers = list(range(1000))
    assert asking.poll(idle=False) is None
    asking.observe(build_record(1000))
    slow.go.release()
    assert wait(asking) == 1000
    slow.go.release()
    assert wait(asking) == 1001


def test_an_error_of_the_sampler_reaches_the_loop(slow, asking):
    slow.propose = Mock(side_effect=TimeoutError("the sampler's own"))
    with pytest.raises(TimeoutError, match="the sampler's own"):
        wait(asking, idle=True)


def test_a_free_slot_that_waits_for_a_proposal_is_not_the_end(tmp_path, monkeypatch):
    gate, propose = threading.Semaphore(0), SamplerView.propose
    monkeypatch.setattr(
        SamplerView, "propose", lambda self: gate.acquire(timeout=60) and propose(self)
    )
    monkeypatch.setattr(proposals, "IDLE_WAIT_SECONDS", 0.01)
    spec = load_code_spec(tmp_path, ["search.trials=3", "search.replicates.max_runs=0"])
    with Ledger.open(spec) as ledger:
        driver, started = Driver(ledger, slots=2), []
        for trial_id in (driver.ask(), driver.ask()):  # the baselines
            driver.end(trial_id)
        assert [driver.ask(), driver.ask()] == [None, None]  # nothing runs, and it is not over
        assert len(ledger.get_records()) == 2
        gate.release(6)
        while len(started) < 2:
            trial_id = driver.ask()
            started += [trial_id] if trial_id in driver.in_flight else []
        assert driver.ask() is None  # no slot
        driver.end(started[0])
        while driver.ask() is None:
            pass
        assert [record.role for record in ledger.get_records()[2:]] == ["search"] * 3
        driver.searcher.close()
