"""A cluster of several nodes of which one is lost: what ran there goes on elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from killed_sweeps import FAKE_TRAINING, ROOT, KilledSweep, kill_node, wait_until
from ray._private.node import Node
from ray.cluster_utils import Cluster
from sweep_properties import every_trial_is_there_once, no_trial_goes_back_behind_a_checkpoint

from gdpo_tune.ledger import Ledger

pytestmark = [
    # Ray's utility leaves its log files and pipes to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SWEEP = (
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "search.replicates={per_point: 1, max_runs: 1}",
    "training.steps=6",
    "resources={cpus: 1, gpus: 0.5}",
)


@contextmanager
def cluster_of(monkeypatch: pytest.MonkeyPatch, gpus: int) -> Iterator[tuple[str, Node]]:
    """The address of two nodes with so many logical GPUs each, and the one that is no head."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = [str(ROOT), str(FAKE_TRAINING), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    each = {"num_cpus": 2 * gpus, "num_gpus": gpus, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    try:
        yield cluster.address, cluster.add_node(**each)
    finally:
        cluster.shutdown()


def starts(sweep: KilledSweep) -> list[dict[str, Any]]:
    """Where trials have begun."""
    file = sweep.spec.directory / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [entry for entry in map(json.loads, lines) if "node" in entry]


def wait_at_gate(sweep: KilledSweep, process: subprocess.Popen[bytes], slots: int) -> None:
    """Until as many trials as there are slots wait, two on each GPU, beyond a checkpoint."""

    def all_wait() -> bool:
        file = sweep.spec.directory / "log.jsonl"
        return file.exists() and file.read_text().count('"checkpoint": 2}') == slots

    wait_until(process, all_wait, sweep.told)
    taken = Counter((entry["node"], entry["gpus"]) for entry in starts(sweep))
    assert sorted(taken.values()) == [2] * (slots // 2), taken


def close_gate(sweep: KilledSweep) -> None:
    sweep.spec.directory.mkdir(parents=True)
    (sweep.spec.directory / "faults.json").write_text(json.dumps({"all": "gate"}))


def open_gate(sweep: KilledSweep) -> None:
    (sweep.spec.directory / "go").touch()


def told(sweep: KilledSweep) -> list[str]:
    """What befell the sweep, as the ledger has it."""
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return [str(what) for session in ledger.sessions() for what in session["incidents"]]


def check(sweep: KilledSweep, moved: int) -> None:
    every_trial_is_there_once(sweep)
    no_trial_goes_back_behind_a_checkpoint(sweep)
    incidents = told(sweep)
    # of a node that does not answer, Ray says only after a while that it is gone
    assert any("was lost, with" in what or "was cut off" in what for what in incidents), incidents
    assert sum("goes on at node" in what for what in incidents) == moved, incidents


def test_what_ran_on_a_lost_node_goes_on_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with cluster_of(monkeypatch, gpus=1) as (address, node):
        sweep = KilledSweep(tmp_path, (*SWEEP, "search.trials=3"), fake=True, address=address)
        close_gate(sweep)
        with sweep.running() as process:
            wait_at_gate(sweep, process, slots=4)
            kill_node(node)
            open_gate(sweep)
            assert process.wait() == 0, sweep.told()
        check(sweep, moved=2)
        again = [entry for entry in starts(sweep) if entry["from"]]
        assert [entry["from"] for entry in again] == [2, 2]
        assert node.node_id not in {entry["node"] for entry in again}


@pytest.mark.fault
def test_a_node_and_then_the_driver_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with cluster_of(monkeypatch, gpus=2) as (address, node):
        sweep = KilledSweep(tmp_path, (*SWEEP, "search.trials=12"), fake=True, address=address)
        close_gate(sweep)
        with sweep.running() as process:
            wait_at_gate(sweep, process, slots=8)
            kill_node(node)
            open_gate(sweep)
            lost = time.monotonic()
            wait_until(process, lambda: len(starts(sweep)) > 8, sweep.told)
            print(f"{time.monotonic() - lost:.1f} s from the loss of the node to the next start")
            wait_until(process, lambda: sum("goes on" in w for w in told(sweep)) == 4, sweep.told)
            process.kill()
            process.wait()
        sweep.finish()
        check(sweep, moved=4)
        print("\n".join(told(sweep)))
