"""A sweep on a real Ray that a person steers, with the fake training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.steering import Steering
from tests.support.killed_sweeps import KilledSweep, wait_for_condition
from tests.support.tuning import ENDS_ONLY

pytestmark = [pytest.mark.system, pytest.mark.integration]

APPLIED_WITHIN = 5.0
"""Seconds that a request may take."""
SLOW = (
    *ENDS_ONLY,
    'constraints.correctness=">= 0.2"',  # no trial refers to a baseline, so each may stop
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "search.trials=3",
    "search.replicates.max_runs=0",
    "training.steps=600",
    "training.checkpoint_every=600",
)


def read_records(sweep: KilledSweep) -> list[TrialRecord]:
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return ledger.get_records()


def list_states(sweep: KilledSweep) -> list[str]:
    return [record.state for record in read_records(sweep)] if sweep.has_records(3) else []


@pytest.mark.slow
def test_what_a_person_asks_for_is_in_the_ledger_within_five_seconds(tmp_path: Path):
    sweep = KilledSweep(tmp_path, SLOW, fake=True)
    sweep.slow_down()

    def ask(action: str, **arguments: Any) -> None:
        request = steering.request(action, arguments, "anna")
        recorded = steering.wait(request.id, APPLIED_WITHIN)
        assert recorded is not None, action
        assert recorded.outcome == "applied"
        assert recorded.applied - request.asked < APPLIED_WITHIN

    def wait(condition: Callable[[], bool]) -> None:
        wait_for_condition(process, condition, sweep.read_errors)

    with sweep.start() as process:
        # Both slots are busy for minutes, so no suggestion is due.
        wait(lambda: list_states(sweep).count("running") == 2 and bool(sweep.read_log()))
        steering = Steering(sweep.spec.directory)
        ask("clone", trial=1, changes={"learning_rate": 2e-4})
        ask("stop", trial=0)
        wait(lambda: list_states(sweep) == ["pruned", "running", "running"])
        assert read_records(sweep)[2].params["learning_rate"] == 2e-4
        ask("pause")
        ask("trials", number=1)
        for number in (1, 2):
            ask("stop", trial=number)
        wait(lambda: list_states(sweep) == ["pruned"] * 3)
        time.sleep(3)
        assert list_states(sweep) == ["pruned"] * 3  # nothing starts, and the process stays
        ask("add", params={"learning_rate": 1e-4, "group_size": 4})  # while nothing runs
        sweep.set_faults({})
        ask("resume")
        assert process.wait(timeout=300) == 0, sweep.read_errors()

    records = read_records(sweep)
    assert [record.reason for record in records[:3]] == ["stopped by anna"] * 3
    added = [record.params["learning_rate"] for record in records if record.request]
    assert added == [2e-4, 1e-4]
    searched = [record for record in records if record.role == "search" and not record.request]
    assert len(searched) == 1
    assert len(steering.list_requests()) == 8
    assert steering.list_pending() == []
