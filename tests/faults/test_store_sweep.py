"""A sweep on an object store: nodes and the driver share no folder, and both are lost."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdpo_tune.core.object_store import CACHE
from gdpo_tune.ledger import Ledger
from tests.support.cluster_sweeps import NODE, VARIABLES, list_incidents
from tests.support.gated_sweeps import GATED, close_gate, open_gate, wait_at_gate
from tests.support.killed_sweeps import KilledSweep, wait_until
from tests.support.mlflow_servers import run_postgres
from tests.support.ray_nodes import RayNode, make_short_directory, open_ray_cluster
from tests.support.s3_servers import BUCKET, S3Server, start_s3_server
from tests.support.sweep_properties import check_no_trial_goes_back

pytestmark = pytest.mark.fault


class StoredSweep(KilledSweep):
    """One whose log is in `folder/fake`, which stands for what nobody has in reality."""

    @property
    def fake_folder(self) -> Path:
        """Where the fake training has its log and is told what to do."""
        return self.folder / "fake"


@pytest.fixture
def store() -> Iterator[S3Server]:
    with start_s3_server() as server:
        yield server


@pytest.fixture
def sweep(
    tmp_path: Path, store: S3Server, no_authentication: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[StoredSweep, RayNode]]:
    """Not started yet, on two nodes with folders of their own; and the one that is no head."""
    monkeypatch.setenv("FAKE_SWEEP", str(tmp_path / "fake"))
    monkeypatch.setenv(CACHE, str(tmp_path / "driver"))
    one, two = (("env", f"{CACHE}={tmp_path / name}") for name in ("one", "two"))
    with (
        make_short_directory() as folder,
        run_postgres() as ledger,
        open_ray_cluster(folder, **VARIABLES) as cluster,
    ):
        cluster.start_head(one, **NODE, gpus=1)
        node = cluster.add_node(within=two, **NODE, gpus=1)
        where = (f"storage=s3://{BUCKET}/night", f"ledger={ledger}")
        given = (*GATED, "search.trials=3", *where)
        made = StoredSweep(tmp_path, given, fake=True, address=cluster.address)
        close_gate(made)
        yield made, node


def incidents(sweep: StoredSweep) -> str:
    return " ".join(list_incidents(sweep))


def check_end(sweep: StoredSweep, store: S3Server) -> None:
    """Every trial is there, and of each the one checkpoint that stays, whole."""
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        records = ledger.get_records()
    assert [record.state for record in records] == ["complete"] * 6
    check_no_trial_goes_back(sweep)
    trials = f"night/{sweep.spec.name}/trials"
    left = [name for name in store.list_names() if name.endswith("/complete.json")]
    kept = [f"{trials}/{r.number}/checkpoint-6/complete.json" for r in records if r.checkpoint]
    assert left == kept
    assert kept


def test_a_node_the_driver_and_its_disk_are_lost(
    sweep: tuple[StoredSweep, RayNode], store: S3Server
):
    night, node = sweep
    with night.running() as process:
        wait_at_gate(night, process, slots=4)
        assert {entry["node"] for entry in night.list_starts()} > {node.id}
        node.kill()
        wait_until(process, lambda: "was lost" in incidents(night), night.read_errors)
        process.kill()
        process.wait()
    shutil.rmtree(night.folder / "driver")
    shutil.rmtree(night.folder / "two")
    open_gate(night)
    night.finish()
    check_end(night, store)
    assert [entry["from"] for entry in night.list_starts()[4:8]] == [2] * 4
    assert list((night.folder / "one" / "attempts").iterdir()) == []


def test_ctrl_c_reaches_trials_that_share_no_disk_with_the_driver(
    sweep: tuple[StoredSweep, RayNode], store: S3Server
):
    night, _ = sweep
    with night.running() as process:
        wait_at_gate(night, process, slots=4)
        process.send_signal(signal.SIGINT)
        wait_until(process, lambda: store.read(f"night/{night.spec.name}/stop") == b"all")
        open_gate(night)
        assert process.wait() == 0, night.read_errors()
    stopped = [entry["checkpoint"] for entry in night.read_log() if "checkpoint" in entry]
    assert max(stopped) < 6  # the last step, at which a trial would have ended by itself
    night.finish()
    check_end(night, store)
    assert sorted(entry["from"] for entry in night.list_starts()[4:8]) == [3] * 4


def test_a_store_that_is_away_for_a_while_costs_no_attempt(
    sweep: tuple[StoredSweep, RayNode], store: S3Server
):
    night, _ = sweep
    with night.running() as process:
        wait_at_gate(night, process, slots=4)
        with store.away():
            open_gate(night)
            wait_until(process, lambda: "waits for s3://" in incidents(night), night.read_errors)
        assert process.wait() == 0, night.read_errors()
    check_end(night, store)
    assert [entry["from"] for entry in night.list_starts()] == [0] * 6
    befell = list_incidents(night)
    assert any("goes on: s3://" in w and "answers again after" in w for w in befell), befell
    print("\n".join(befell))
