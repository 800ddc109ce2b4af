"""A sampler that works in another thread than the loop: its records and its proposals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning import proposals
from gdpo_tune.tuning.proposals import Proposals, SamplerView, Suggestion
from tests.support.search_driver import Driver
from tests.support.tuning import load_code_spec


class SlowProjection:
    """Proposes its number of records; blocks until the test releases it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.proposals = 0
        self.go = threading.Semaphore(0)

    @property
    def record_count(self) -> int:
        return len(self.numbers)

    def observe(self, record: TrialRecord) -> None:
        self.numbers.append(record.number)

    def propose(self) -> Suggestion:
        knew = self.record_count
        self.proposals += 1
        assert self.go.acquire(timeout=60)
        return Suggestion({"knew": knew}, "model")


@pytest.fixture
def slow() -> SlowProjection:
    return SlowProjection()


@pytest.fixture
def asking(slow: SlowProjection, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proposals, "BUSY_WAIT_SECONDS", 0.001)
    created = Proposals(slow)  # pyright: ignore[reportArgumentType]
    yield created
    for _ in range(3):
        slow.go.release()
    created.close()


def build_record(number: int) -> TrialRecord:
    return TrialRecord(number, "search", "complete", {}, number, "model")


def wait_for_suggestion(answer: Callable[[], Suggestion | None]) -> Suggestion:
    """Call `answer` until it returns a suggestion."""
    while (suggestion := answer()) is None:
        time.sleep(0.001)
    return suggestion


def test_the_loop_goes_on_until_the_sampler_is_done(slow: SlowProjection, asking: Proposals):
    assert [asking.poll(idle=False) for _ in range(3)] == [None] * 3
    assert slow.proposals == 1
    slow.go.release()
    assert wait_for_suggestion(lambda: asking.poll(idle=False)).params == {"knew": 0}


def test_results_that_arrive_during_a_proposal_reach_it(slow: SlowProjection, asking: Proposals):
    assert asking.poll(idle=False) is None
    asking.observe(build_record(0))
    slow.go.release()
    slow.go.release()
    assert wait_for_suggestion(lambda: asking.poll(idle=False)).params == {"knew": 1}


def test_quick_results_do_not_starve_a_slow_sampler(slow: SlowProjection, asking: Proposals):
    assert asking.poll(idle=False) is None
    asking.observe(build_record(0))
    slow.go.release()
    while slow.proposals < 2:
        assert asking.poll(idle=False) is None
    asking.observe(build_record(1))
    slow.go.release()
    assert wait_for_suggestion(lambda: asking.poll(idle=False)).params == {"knew": 1}
    assert slow.numbers == [0, 1]
    # and the next proposal knows all
    slow.go.release()
    assert wait_for_suggestion(lambda: asking.poll(idle=False)).params == {"knew": 2}


def test_few_results_after_many_wait_for_the_next_proposal(slow: SlowProjection, asking: Proposals):
    slow.numbers = list(range(1000))
    assert asking.poll(idle=False) is None
    asking.observe(build_record(1000))
    slow.go.release()
    assert wait_for_suggestion(lambda: asking.poll(idle=False)).params == {"knew": 1000}
    slow.go.release()
    assert wait_for_suggestion(lambda: asking.poll(idle=False)).params == {"knew": 1001}


def test_an_error_of_the_sampler_reaches_the_loop(asking: Proposals, slow: SlowProjection):
    def broken() -> Suggestion:
        raise TimeoutError("the sampler's own")

    slow.propose = broken
    with pytest.raises(TimeoutError, match="the sampler's own"):
        wait_for_suggestion(lambda: asking.poll(idle=True))


def test_a_free_slot_that_waits_for_a_proposal_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate, ask = threading.Semaphore(0), SamplerView.propose

    def slow_ask(self: SamplerView) -> Suggestion:
        assert gate.acquire(timeout=60)
        return ask(self)

    monkeypatch.setattr(SamplerView, "propose", slow_ask)
    monkeypatch.setattr(proposals, "IDLE_WAIT_SECONDS", 0.01)
    spec = load_code_spec(tmp_path, ["search.trials=3", "search.replicates.max_runs=0"])
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=2)
        for trial_id in (driver.ask(), driver.ask()):  # the baselines
            driver.end(trial_id)
        assert [driver.ask(), driver.ask()] == [None, None]  # nothing runs, and it is not over
        assert len(ledger.get_records()) == 2
        for _ in range(6):
            gate.release()
        started: list[str] = []
        while len(started) < 2:
            trial_id = driver.ask()
            started += [trial_id] if trial_id in driver.in_flight else []
        assert driver.ask() is None  # no slot
        driver.end(started[0])
        while driver.ask() is None:
            pass
        assert [record.role for record in ledger.get_records()[2:]] == ["search"] * 3
        driver.searcher.close()


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_proposal_leaves_no_trace_until_its_trial_starts(tmp_path: Path, sampler: str):
    view = SamplerView(load_code_spec(tmp_path, [f"search.sampler={sampler}"]))
    first = view.propose()
    assert view.study.trials == []
    assert view.propose().params == first.params  # nothing has happened
