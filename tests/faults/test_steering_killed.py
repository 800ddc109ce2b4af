"""Requests to a sweep whose process is killed in the middle of them: none lost, none twice."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.events import Request
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import build_request, leave_request, list_pending
from tests.support.killed_sweeps import KilledSweep, kill_driver, wait_for_condition
from tests.support.tuning import ENDS_ONLY

pytestmark = pytest.mark.fault

KILLS = 10
BURST = 8
"""Requests that are left at once, shortly before a kill."""
LATE = 1.3
"""Most seconds from a burst to a kill at a random moment; the driver looks once a second."""
SLOW = (
    *ENDS_ONLY,
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "search.trials=6",
    "search.replicates.max_runs=0",
    "training.steps=20",
)


def build_burst(turn: int) -> list[Request]:
    """Build requests of every kind, of which some will be refused."""
    point = {"learning_rate": 5e-5 + 1e-6 * turn, "group_size": 4}
    content = [
        ("add", {"params": point}),
        ("stop", {"trial": turn}),
        ("stop", {"trial": 999}),
        ("trials", {"number": 12 + turn}),
        ("pause", {}),
        ("clone", {"trial": 1, "changes": {"learning_rate": 1.5e-4 + 1e-6 * turn}}),
        ("budget", {"completions": 10**6 + turn}),
        ("resume", {}),
    ]
    assert len(content) == BURST
    return [build_request(action, arguments, "anna") for action, arguments in content]


def has_items(read: Callable[[], list[Any]], count: int) -> bool:
    return len(read()) >= count


def count_recorded(sweep: KilledSweep) -> int:
    return (sweep.spec.directory / "ledger.journal").read_bytes().count(b'"request:')


def list_recorded(sweep: KilledSweep) -> list[str]:
    """List the ids of requests in the file of the ledger, with repetitions."""
    attributes = [json.loads(line).get("user_attr", {}) for line in sweep.read_journal()]
    return [
        value["id"]
        for attribute in attributes
        for name, value in attribute.items()
        if name.startswith("request:")
    ]


def test_no_request_is_lost_or_applied_twice_by_kills_of_the_driver(tmp_path: Path):
    sweep, chance = KilledSweep(tmp_path, SLOW, fake=True), random.Random(18)
    sweep.slow_down()
    directory, asked, found = sweep.spec.directory, list[Request](), Counter[str]()
    for turn in range(KILLS):
        with sweep.start() as process:
            # Two of ten kills lie in the start-up, six between two requests, two anywhere.
            starting, aimed = turn % 5 == 0, turn % 5 < 4
            lines = len(sweep.read_journal()) + 1 if starting else len(sweep.list_starts()) + 1
            read = sweep.read_journal if starting else sweep.list_starts
            wait_for_condition(process, partial(has_items, read, lines), sweep.read_errors)
            for request in build_burst(turn):
                leave_request(directory, request)
                asked.append(request)
            if aimed and not starting:
                count = count_recorded(sweep) + chance.randrange(1, BURST)
                while count_recorded(sweep) < count:
                    assert process.poll() is None, sweep.read_errors()
                process.kill()  # at once: a burst takes the driver some milliseconds
                process.wait()
            else:
                time.sleep(chance.random() * LATE)
                kill_driver(process, whole_machine=True)
        recorded = set(list_recorded(sweep))
        waiting = {file.request.id for file in list_pending(directory) if file.request}
        found["waited"] += len(waiting - recorded)
        found["recorded, and not removed"] += len(waiting & recorded)
        ours = {request.id for request in asked[-BURST:]}
        found["kills in the middle"] += bool(ours & recorded) and bool(ours & waiting)
        assert {request.id for request in asked} <= recorded | waiting, "lost"
    sweep.set_faults({})
    sweep.finish()

    counts = Counter(list_recorded(sweep))
    assert counts == {request.id: 1 for request in asked}
    assert list_pending(directory) == []
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        records, requests, spec = ledger.get_records(), ledger.get_requests(), ledger.spec
    applied = [request for request in requests if request.outcome == "applied"]
    added = [r.id for r in applied if r.action in ("add", "clone")]
    assert Counter(record.request for record in records if record.request) == dict.fromkeys(
        added, 1
    )
    for request in applied:
        if request.action == "stop":
            record = records[request.arguments["trial"]]
            assert record.reason == "stopped by anna" or record.state == "complete"
    limits = [r.arguments["number"] for r in applied if r.action == "trials"]
    assert spec.search.trials == limits[-1]
    searched = sum(record.role == "search" and not record.request for record in records)
    assert searched == spec.search.trials
    print(
        f"{KILLS} kills, {len(asked)} requests: {len(applied)} applied, "
        f"{len(requests) - len(applied)} refused, 0 lost, 0 twice; at the kills: {dict(found)}"
    )
