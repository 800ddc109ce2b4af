"""A cluster of two nodes that loses one: its trials resume on the other node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cluster_sweeps import list_incidents
from tests.support.gated_sweeps import GATED, close_gate, open_gate, wait_at_gate
from tests.support.killed_sweeps import KilledSweep, wait_for_condition
from tests.support.ray_nodes import RayCluster, RayNode
from tests.support.sweep_properties import (
    check_every_trial_once,
    check_no_trial_goes_back,
)


@contextmanager
def lose_node(
    directory: Path, cluster: RayCluster, gpus: int, trials: int
) -> Iterator[tuple[KilledSweep, subprocess.Popen[bytes], RayNode]]:
    """Start a sweep on two nodes, and kill one node once all slots are taken.

    Yields:
        The sweep, its process and the lost node.
    """
    _, node = cluster.start(2, cpus=2 * gpus, gpus=gpus)
    overrides = (*GATED, f"search.trials={trials}")
    sweep = KilledSweep(directory, overrides, fake=True, address=cluster.address)
    close_gate(sweep)
    with sweep.start() as process:
        wait_at_gate(sweep, process, slots=4 * gpus)
        node.kill()
        open_gate(sweep)
        yield sweep, process, node


def check_end(sweep: KilledSweep, moved: int) -> None:
    check_every_trial_once(sweep)
    check_no_trial_goes_back(sweep)
    incidents = list_incidents(sweep)
    # Ray reports the loss of a silent node only after a while
    assert any(
        "was lost, with" in incident or "was cut off" in incident for incident in incidents
    ), incidents
    assert sum("resumes on node" in incident for incident in incidents) == moved, incidents


@pytest.mark.system
@pytest.mark.slow
def test_trials_of_a_lost_node_resume_on_another_node(tmp_path: Path, empty_cluster: RayCluster):
    with lose_node(tmp_path, empty_cluster, gpus=1, trials=3) as (sweep, process, node):
        assert process.wait() == 0, sweep.read_errors()
    check_end(sweep, moved=2)
    again = [entry for entry in sweep.list_starts() if entry["from"]]
    assert [entry["from"] for entry in again] == [2, 2]
    assert node.id not in {entry["node"] for entry in again}


@pytest.mark.fault
def test_a_node_and_then_the_driver_are_lost(tmp_path: Path, empty_cluster: RayCluster):
    with lose_node(tmp_path, empty_cluster, gpus=2, trials=12) as (sweep, process, _):
        lost = time.monotonic()
        wait_for_condition(process, lambda: len(sweep.list_starts()) > 8, sweep.read_errors)
        print(f"{time.monotonic() - lost:.1f} s from the loss of the node to the next start")
        wait_for_condition(
            process,
            lambda: sum("resumes on" in w for w in list_incidents(sweep)) == 4,
            sweep.read_errors,
        )
        process.kill()
        process.wait()
    sweep.finish()
    check_end(sweep, moved=4)
    print("\n".join(list_incidents(sweep)))
