"""A cluster of which something is killed: the process of a trial, the driver, a node, the head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster_sweeps import (
    ASHA,
    FIFO,
    MARKS,
    NODE,
    SLOTS,
    Whole,
    came_back,
    fault,
    row,
    slow_sweep,
    told,
    training,
    under_way,
)
from tests.support.killed_sweeps import wait_until
from tests.support.ray_nodes import RayCluster

pytestmark = MARKS


def test_processes_of_trials(tmp_path: Path, cluster: RayCluster, whole: Whole):
    sweep = slow_sweep(tmp_path, ASHA, cluster)
    with under_way(sweep) as process:
        with fault() as known:
            for victim in training(sweep)[:2]:
                victim.kill()
        assert process.wait() == 0, sweep.told()
    came_back(cluster, sweep, whole["asha"])
    assert sum("is tried again: the trial's process died" in what for what in told(sweep)) == 2
    assert row("processes of two trials killed", sweep, known)


def test_the_driver(tmp_path: Path, cluster: RayCluster, whole: Whole):
    sweep = slow_sweep(tmp_path, ASHA, cluster)
    with under_way(sweep) as process, fault() as known:
        process.kill()
        process.wait()
    sweep.finish()
    came_back(cluster, sweep, whole["asha"])
    assert row("driver killed, command repeated at once", sweep, known)


def test_the_only_other_node_until_it_is_replaced(
    tmp_path: Path, empty_cluster: RayCluster, whole: Whole
):
    """Nothing has room for a trial until a new machine joins."""
    empty_cluster.start_head(cpus=0)
    node = empty_cluster.add_node(cpus=SLOTS)
    sweep = slow_sweep(tmp_path, FIFO, empty_cluster)
    with under_way(sweep) as process:
        with fault() as known:
            node.kill()
            empty_cluster.nodes.remove(node)
            wait_until(
                process, lambda: any("waits for nodes" in w for w in told(sweep)), sweep.told
            )
            empty_cluster.add_node(cpus=SLOTS)
        assert process.wait() == 0, sweep.told()
    came_back(empty_cluster, sweep, whole["fifo"])
    assert row("only node killed, another one joined", sweep, known)


@pytest.mark.parametrize("what", ["gcs_server", "all of it"])
def test_the_head(tmp_path: Path, empty_cluster: RayCluster, whole: Whole, what: str):
    """It is started again at its address, with the other node; the same command goes on."""
    cluster = empty_cluster
    head, other = cluster.start(2, **NODE)
    sweep = slow_sweep(tmp_path, ASHA, cluster)
    with under_way(sweep) as process:
        with fault() as known:
            if what == "gcs_server":
                head.server(what).kill()
            else:
                head.kill()
            status = process.wait(300)
        assert status == 1, sweep.told()
        assert "a server of Ray is gone" in sweep.told()
    for node in (head, other):  # what is left of them; nothing of it goes on writing
        node.kill()
        cluster.nodes.remove(node)
    written = len(sweep.log())
    cluster.start(2, **NODE)
    assert len(sweep.log()) == written
    sweep.finish()
    came_back(cluster, sweep, whole["asha"])
    assert row(f"head killed ({what}), cluster and command begun again", sweep, known)
