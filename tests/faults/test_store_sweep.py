"""A sweep on an object store: nodes and the driver share no directory, and both are lost."""

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
from tests.support.killed_sweeps import KilledSweep, wait_for_condition
from tests.support.ray_nodes import RayNode, make_short_directory, open_ray_cluster
from tests.support.s3_servers import BUCKET, S3Server, start_s3_server
from tests.support.sweep_properties import check_no_trial_goes_back
from tests.support.tuning import ENDS_ONLY

pytestmark = pytest.mark.fault


class StoredSweep(KilledSweep):
    """A sweep on an object store; the log of the fake training is in `directory/fake`."""

    @property
    def fake_directory(self) -> Path:
        """The directory with the log and the faults of the fake training."""
        return self.directory / "fake"


@pytest.fixture
def store() -> Iterator[S3Server]:
    with start_s3_server() as server:
        yield server


@pytest.fixture
def sweep(
    tmp_path: Path,
    store: S3Server,
    no_authentication: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[StoredSweep, RayNode]]:
    """A sweep that is not started, on two nodes with their own directories; and the second node."""
    monkeypatch.setenv("FAKE_SWEEP", str(tmp_path / "fake"))
    monkeypatch.setenv(CACHE, str(tmp_path / "driver"))
    one, two = (("env", f"{CACHE}={tmp_path / name}") for name in ("one", "two"))
    with (
        make_short_directory() as directory,
        open_ray_cluster(directory, **VARIABLES) as cluster,
    ):
        cluster.start_head(one, **NODE, gpus=1)
        node = cluster.add_node(prefix=two, **NODE, gpus=1)
        storage = f"storage=s3://{BUCKET}/night"
        overrides = (*GATED, *ENDS_ONLY, "search.trials=3", storage)
        stored = StoredSweep(tmp_path, overrides, fake=True, address=cluster.address)
        close_gate(stored)
        yield stored, node


def join_incidents(sweep: StoredSweep) -> str:
    return " ".join(list_incidents(sweep))


def check_end(sweep: StoredSweep, store: S3Server) -> None:
    """Check that every trial is complete and the store has exactly the kept checkpoints."""
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        records = ledger.get_records()
    assert [record.state for record in records] == ["complete"] * 6
    check_no_trial_goes_back(sweep)
    trials = f"night/{sweep.spec.name}/trials"
    left = [name for name in store.list_names() if name.endswith("/complete.json")]
    expected = [f"{trials}/{r.number}/checkpoint-6/complete.json" for r in records if r.checkpoint]
    assert left == expected
    assert expected


def test_a_node_the_driver_and_its_disk_are_lost(
    sweep: tuple[StoredSweep, RayNode], store: S3Server
):
    night, node = sweep
    with night.start() as process:
        wait_at_gate(night, process, slots=4)
        assert {entry["node"] for entry in night.list_starts()} > {node.id}
        node.kill()
        wait_for_condition(process, lambda: "was lost" in join_incidents(night), night.read_errors)
        process.kill()
        process.wait()
    shutil.rmtree(night.directory / "driver")
    shutil.rmtree(night.directory / "two")
    open_gate(night)
    night.finish()
    check_end(night, store)
    assert list_second_starts(night) == [2] * 4
    assert list((night.directory / "one" / "attempts").iterdir()) == []


def list_second_starts(night: StoredSweep) -> list[int]:
    """List the steps from which the first four trials went on; others may begin between them."""
    first, later = night.list_starts()[:4], night.list_starts()[4:]
    return [next(e["from"] for e in later if e["trial"] == entry["trial"]) for entry in first]


def test_ctrl_c_reaches_trials_that_share_no_disk_with_the_driver(
    sweep: tuple[StoredSweep, RayNode], store: S3Server
):
    night, _ = sweep
    with night.start() as process:
        wait_at_gate(night, process, slots=4)
        process.send_signal(signal.SIGINT)
        wait_for_condition(process, lambda: store.read(f"night/{night.spec.name}/stop") == b"all")
        open_gate(night)
        assert process.wait() == 0, night.read_errors()
    stopped = [entry["checkpoint"] for entry in night.read_log() if "checkpoint" in entry]
    assert max(stopped) < 6  # the last step, at which a trial would have ended by itself
    night.finish()
    check_end(night, store)
    assert list_second_starts(night) == [3] * 4


def test_a_store_outage_costs_no_attempt(sweep: tuple[StoredSweep, RayNode], store: S3Server):
    night, _ = sweep
    with night.start() as process:
        wait_at_gate(night, process, slots=4)
        with store.keep_stopped():
            open_gate(night)
            wait_for_condition(
                process, lambda: "waits for s3://" in join_incidents(night), night.read_errors
            )
        assert process.wait() == 0, night.read_errors()
    check_end(night, store)
    assert [entry["from"] for entry in night.list_starts()] == [0] * 6
    befell = list_incidents(night)
    assert any("continues: s3://" in w and "answers again after" in w for w in befell), befell
    print("\n".join(befell))
