"""A cluster of two nodes of which one is lost: what ran there goes on elsewhere."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cluster_sweeps import list_incidents
from tests.support.gated_sweeps import GATED, close_gate, open_gate, wait_at_gate
from tests.support.killed_sweeps import KilledSweep, wait_until
from tests.support.ray_nodes import RayCluster, RayNode
from tests.support.sweep_properties import (
    check_every_trial_once,
    check_no_trial_goes_back,
)


@contextmanager
def just_lost(
    folder: Path, cluster: RayCluster, gpus: int, trials: int
) -> Iterator[tuple[KilledSweep, subprocess.Popen[bytes], RayNode]]:
    """A sweep and its process, when all slots were taken and one of two nodes, with so many
    logical GPUs each, is lost; and that node."""
    _, node = cluster.start(2, cpus=2 * gpus, gpus=gpus)
    given = (*GATED, f"search.trials={trials}")
    sweep = KilledSweep(folder, given, fake=True, address=cluster.address)
    close_gate(sweep)
    with sweep.running() as process:
        wait_at_gate(sweep, process, slots=4 * gpus)
        node.kill()
        open_gate(sweep)
        yield sweep, process, node


def check(sweep: KilledSweep, moved: int) -> None:
    check_every_trial_once(sweep)
    check_no_trial_goes_back(sweep)
    incidents = list_incidents(sweep)
    # of a node that does not answer, Ray says only after a while that it is gone
    assert any("was lost, with" in what or "was cut off" in what for what in incidents), incidents
    assert sum("goes on at node" in what for what in incidents) == moved, incidents


def test_what_ran_on_a_lost_node_goes_on_elsewhere(tmp_path: Path, empty_cluster: RayCluster):
    with just_lost(tmp_path, empty_cluster, gpus=1, trials=3) as (sweep, process, node):
        assert process.wait() == 0, sweep.read_errors()
    check(sweep, moved=2)
    again = [entry for entry in sweep.list_starts() if entry["from"]]
    assert [entry["from"] for entry in again] == [2, 2]
    assert node.id not in {entry["node"] for entry in again}


@pytest.mark.fault
def test_a_node_and_then_the_driver_are_lost(tmp_path: Path, empty_cluster: RayCluster):
    with just_lost(tmp_path, empty_cluster, gpus=2, trials=12) as (sweep, process, _):
        lost = time.monotonic()
        wait_until(process, lambda: len(sweep.list_starts()) > 8, sweep.read_errors)
        print(f"{time.monotonic() - lost:.1f} s from the loss of the node to the next start")
        wait_until(
            process,
            lambda: sum("goes on" in w for w in list_incidents(sweep)) == 4,
            sweep.read_errors,
        )
        process.kill()
        process.wait()
    sweep.finish()
    check(sweep, moved=4)
    print("\n".join(list_incidents(sweep)))
