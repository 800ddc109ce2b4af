"""A sweep on an object store: nodes and the driver share no folder, and both are lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from killed_sweeps import FAKE_TRAINING, ROOT, SPACE, KilledSweep, kill_node, wait_until
from ray._private.node import Node
from ray.cluster_utils import Cluster

from gdpo_tune.ledger import Ledger
from gdpo_tune.object_store import CACHE
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.trials import TrialRecord

sys.path.append(str(FAKE_TRAINING))

from mlflow_servers import postgres
from s3_servers import BUCKET, S3Server, s3_server

pytestmark = [
    pytest.mark.fault,
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
    "search.trials=3",
)


class StoredSweep(KilledSweep):
    """One whose log is in `folder/fake`, which stands for what nobody has in reality."""

    @property
    def spec(self) -> SweepSpec:
        return load_spec(SPACE, [*self.overrides])

    @property
    def fake_folder(self) -> Path:
        return self.folder / "fake"

    def log(self) -> list[dict[str, Any]]:
        file = self.fake_folder / "log.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def starts(self) -> list[dict[str, Any]]:
        return [entry for entry in self.log() if "from" in entry]

    def waiting(self) -> int:
        return sum(entry.get("checkpoint") == 2 for entry in self.log())

    def records(self) -> list[TrialRecord]:
        with Ledger.open(self.spec, read_only=True) as ledger:
            return ledger.records()

    def incidents(self) -> list[str]:
        with Ledger.open(self.spec, read_only=True) as ledger:
            return [str(what) for session in ledger.sessions() for what in session["incidents"]]


@pytest.fixture
def store() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def sweep(
    tmp_path: Path, store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[StoredSweep, Node]]:
    """Not started yet, on a cluster of two nodes; and the one of them that is no head."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = [str(ROOT), str(FAKE_TRAINING), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("FAKE_SWEEP", str(tmp_path / "fake"))
    monkeypatch.setenv(CACHE, str(tmp_path / "driver"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with postgres(tmp_path) as ledger, two_nodes(tmp_path) as (address, node):
        where = (f"storage=s3://{BUCKET}/night", f"ledger={ledger}")
        made = StoredSweep(tmp_path, (*SWEEP, *where), fake=True, address=address)
        made.fake_folder.mkdir()
        (made.fake_folder / "faults.json").write_text(json.dumps({"all": "gate"}))
        yield made, node


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[str, Node]]:
    """The address of two nodes with local folders of their own, and the one that is no head."""
    each = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 * 2**20}
    local = [{**each, "env_vars": {CACHE: str(folder / name)}} for name in ("one", "two")]
    cluster = Cluster(initialize_head=True, head_node_args={**local[0], "include_dashboard": False})
    try:
        yield cluster.address, cluster.add_node(**local[1])
    finally:
        cluster.shutdown()


def no_trial_goes_back(sweep: StoredSweep) -> None:
    newest: dict[str, int] = {}
    for entry in sweep.log():
        known = newest.get(entry["trial"], 0)
        assert entry.get("from", known) >= known, entry
        newest[entry["trial"]] = entry.get("checkpoint", known)


def wait_at_gate(sweep: StoredSweep, process: subprocess.Popen[bytes]) -> None:
    """Until as many trials as there are slots wait beyond a checkpoint that the store has."""
    wait_until(process, lambda: sweep.waiting() == 4, sweep.told)


def open_gate(sweep: StoredSweep) -> None:
    (sweep.fake_folder / "go").touch()


def check_end(sweep: StoredSweep, store: S3Server) -> None:
    """Every trial is there, and of each the one checkpoint that stays, whole."""
    records = sweep.records()
    assert [record.state for record in records] == ["complete"] * 6
    no_trial_goes_back(sweep)
    trials = f"night/{sweep.spec.name}/trials"
    left = [name for name in store.names() if name.endswith("/complete.json")]
    kept = [f"{trials}/{r.number}/checkpoint-6/complete.json" for r in records if r.checkpoint]
    assert left == kept
    assert kept


def test_a_node_the_driver_and_its_disk_are_lost(sweep: tuple[StoredSweep, Node], store: S3Server):
    night, node = sweep
    with night.running() as process:
        wait_at_gate(night, process)
        assert {entry["node"] for entry in night.starts()} > {node.node_id}
        kill_node(node)
        wait_until(process, lambda: "was lost" in " ".join(night.incidents()), night.told)
        process.kill()
        process.wait()
    shutil.rmtree(night.folder / "driver")
    shutil.rmtree(night.folder / "two")
    open_gate(night)
    night.finish()
    check_end(night, store)
    assert [entry["from"] for entry in night.starts()[4:8]] == [2] * 4
    assert list((night.folder / "one" / "attempts").iterdir()) == []


def test_a_store_that_is_away_for_a_while_costs_no_attempt(
    sweep: tuple[StoredSweep, Node], store: S3Server
):
    night, _ = sweep
    with night.running() as process:
        wait_at_gate(night, process)
        with store.away():
            open_gate(night)
            wait_until(process, lambda: "waits for s3://" in " ".join(night.incidents()))
        assert process.wait() == 0, night.told()
    check_end(night, store)
    assert [entry["from"] for entry in night.starts()] == [0] * 6
    told = night.incidents()
    assert any("goes on: s3://" in what and "answers again after" in what for what in told), told
    print("\n".join(told))
