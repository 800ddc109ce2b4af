"""A cluster of which something is killed: the process of a trial, the driver, a node, the head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster_sweeps import (
    FIFO,
    HALVING,
    MARKS,
    NODE,
    SLOTS,
    UndisturbedSweeps,
    add_row,
    build_slow_sweep,
    check_recovery,
    find_training_processes,
    list_incidents,
    run_until_under_way,
    time_fault,
)
from tests.support.killed_sweeps import wait_for_condition
from tests.support.ray_nodes import RayCluster

pytestmark = MARKS


def test_processes_of_trials(tmp_path: Path, cluster: RayCluster, whole: UndisturbedSweeps):
    sweep = build_slow_sweep(tmp_path, HALVING, cluster)
    with run_until_under_way(sweep) as process:
        with time_fault() as fault:
            for victim in find_training_processes(sweep)[:2]:
                victim.kill()
        assert process.wait() == 0, sweep.read_errors()
    check_recovery(cluster, sweep, whole["halving"])
    died = "is tried again: the trial's process died"
    assert sum(died in incident for incident in list_incidents(sweep)) == 2
    assert add_row("processes of two trials killed", sweep, fault)


def test_the_driver(tmp_path: Path, cluster: RayCluster, whole: UndisturbedSweeps):
    sweep = build_slow_sweep(tmp_path, HALVING, cluster)
    with run_until_under_way(sweep) as process, time_fault() as fault:
        process.kill()
        process.wait()
    sweep.finish()
    check_recovery(cluster, sweep, whole["halving"])
    assert add_row("driver killed, command repeated at once", sweep, fault)


def test_the_only_other_node_until_it_is_replaced(
    tmp_path: Path, empty_cluster: RayCluster, whole: UndisturbedSweeps
):
    """Nothing has room for a trial until a new machine joins."""
    empty_cluster.start_head(cpus=0)
    node = empty_cluster.add_node(cpus=SLOTS)
    sweep = build_slow_sweep(tmp_path, FIFO, empty_cluster)
    with run_until_under_way(sweep) as process:
        with time_fault() as fault:
            node.kill()
            empty_cluster.nodes.remove(node)
            wait_for_condition(
                process,
                lambda: any("waits for nodes" in w for w in list_incidents(sweep)),
                sweep.read_errors,
            )
            empty_cluster.add_node(cpus=SLOTS)
        assert process.wait() == 0, sweep.read_errors()
    check_recovery(empty_cluster, sweep, whole["fifo"])
    assert add_row("only node killed, another one joined", sweep, fault)


@pytest.mark.parametrize("victims", ["gcs_server", "all of it"])
def test_the_head(
    tmp_path: Path, empty_cluster: RayCluster, whole: UndisturbedSweeps, victims: str
):
    """It is started again at its address, with the other node; the same command resumes."""
    cluster = empty_cluster
    head, other = cluster.start(2, **NODE)
    sweep = build_slow_sweep(tmp_path, HALVING, cluster)
    with run_until_under_way(sweep) as process:
        with time_fault() as fault:
            if victims == "gcs_server":
                head.find_server(victims).kill()
            else:
                head.kill()
            status = process.wait(300)
        assert status == 1, sweep.read_errors()
        assert "a server of Ray is gone" in sweep.read_errors()
    for node in (head, other):  # what is left of them; nothing of it keeps writing
        node.kill()
        cluster.nodes.remove(node)
    written = len(sweep.read_log())
    cluster.start(2, **NODE)
    assert len(sweep.read_log()) == written
    sweep.finish()
    check_recovery(cluster, sweep, whole["halving"])
    assert add_row(f"head killed ({victims}), cluster and command restarted", sweep, fault)
