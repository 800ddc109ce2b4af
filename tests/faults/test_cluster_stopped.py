"""Clusters with a process or node that is stopped or cut off for a minute."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.cluster_sweeps import (
    FIFO,
    HALVING,
    MARKS,
    MINUTE,
    NODE,
    VARIABLES,
    UndisturbedSweeps,
    add_row,
    build_slow_sweep,
    check_recovery,
    find_training_processes,
    run_until_under_way,
    time_fault,
    wait_during_fault,
)
from tests.support.killed_sweeps import KilledSweep
from tests.support.ray_nodes import RayCluster, RayNode, make_short_directory, open_ray_cluster

pytestmark = MARKS
NETWORK = "10.231.77"
"""First three numbers of the addresses of a network that exists on this machine alone."""


def run_disturbed(
    sweep: KilledSweep,
    node: RayNode,
    stop: Callable[[subprocess.Popen[bytes]], Callable[[], None]],
    name: str,
    seconds: float = MINUTE,
) -> int:
    """Run a sweep with a fault in the middle; `stop` returns a function that ends the fault.

    Returns:
        The number of delayed trials.
    """
    with run_until_under_way(sweep, node) as process:
        with time_fault() as fault:
            go_on = stop(process)
            wait_during_fault(seconds, process)
            go_on()
        assert process.wait(600) == 0, sweep.read_errors()
    return add_row(name, sweep, fault)


def stop_process(process: psutil.Process) -> Callable[[], None]:
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("victim", ["driver", "trial", "raylet"])
def test_a_process(
    tmp_path: Path, empty_cluster: RayCluster, whole: UndisturbedSweeps, victim: str
):
    cluster = empty_cluster
    _, node = cluster.start(2, **NODE)

    def stop(driver: subprocess.Popen[bytes]) -> Callable[[], None]:
        if victim == "driver":
            return stop_process(psutil.Process(driver.pid))
        return stop_process(
            find_training_processes(sweep, node)[0]
            if victim == "trial"
            else node.find_server("raylet")
        )

    sweep = build_slow_sweep(tmp_path, HALVING, cluster)
    hit = run_disturbed(sweep, node, stop, f"{victim} stopped")
    assert hit or victim == "raylet"  # those that run need none, and may be done before it is back
    check_recovery(cluster, sweep, whole["halving"])


def test_a_whole_node(tmp_path: Path, empty_cluster: RayCluster, whole: UndisturbedSweeps):
    """Like a hypervisor that moves a machine, or a laptop that is closed."""
    cluster = empty_cluster
    _, node = cluster.start(2, **NODE)

    def stop(_: subprocess.Popen[bytes]) -> Callable[[], None]:
        node.pause()
        return node.resume

    sweep = build_slow_sweep(tmp_path, FIFO, cluster)
    assert run_disturbed(sweep, node, stop, "node stopped")
    check_recovery(cluster, sweep, whole["fifo"])


def run_ip_command(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextmanager
def create_network() -> Iterator[None]:
    """Create a bridge at `NETWORK`.1, connected with a namespace at `NETWORK`.2."""
    try:
        for words in (
            "link add gdpo-bridge type bridge",
            f"address add {NETWORK}.1/24 dev gdpo-bridge",
            "link set gdpo-bridge up",
            "netns add gdpo-node",
            "link add gdpo-cable type veth peer name eth0 netns gdpo-node",
            "link set gdpo-cable master gdpo-bridge up",
            f"-n gdpo-node address add {NETWORK}.2/24 dev eth0",
            "-n gdpo-node link set eth0 up",
            "-n gdpo-node link set lo up",
        ):
            run_ip_command(words)
        yield
    finally:
        for words in ("netns del gdpo-node", "link del gdpo-bridge"):
            with suppress(subprocess.CalledProcessError):
                run_ip_command(words)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
@pytest.mark.parametrize("seconds", [20, MINUTE])
def test_the_network_of_a_node(
    tmp_path: Path, no_authentication: None, whole: UndisturbedSweeps, seconds: float
):
    """The node is in a network namespace, and its cable is pulled. Its disk is not."""
    settings = {"ip": f"{NETWORK}.1", **VARIABLES}
    with (
        create_network(),
        make_short_directory() as directory,
        open_ray_cluster(directory, **settings) as cluster,
    ):
        cluster.start_head(**NODE)
        node = cluster.add_node(f"{NETWORK}.2", ("ip", "netns", "exec", "gdpo-node"), **NODE)

        def cut(_: subprocess.Popen[bytes]) -> Callable[[], None]:
            run_ip_command("link set gdpo-cable down")
            return lambda: run_ip_command("link set gdpo-cable up")

        sweep = build_slow_sweep(tmp_path, FIFO, cluster)
        assert run_disturbed(sweep, node, cut, "network of a node cut", seconds)
        check_recovery(cluster, sweep, whole["fifo"])
