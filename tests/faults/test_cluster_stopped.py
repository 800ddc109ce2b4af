"""A cluster of which something does not answer for a minute: stopped by SIGSTOP, or cut off."""

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
    ASHA,
    FIFO,
    MARKS,
    MINUTE,
    NODE,
    VARIABLES,
    Whole,
    add_row,
    build_slow_sweep,
    check_recovery,
    find_training_processes,
    let_last,
    run_until_under_way,
    time_fault,
)
from tests.support.killed_sweeps import KilledSweep
from tests.support.ray_nodes import RayCluster, RayNode, make_short_directory, open_ray_cluster

pytestmark = MARKS
NETWORK = "10.231.77"
"""First three numbers of the addresses of a network that exists on this machine alone."""


def disturbed(
    sweep: KilledSweep,
    node: RayNode,
    stop: Callable[[subprocess.Popen[bytes]], Callable[[], None]],
    name: str,
    seconds: float = MINUTE,
) -> int:
    """A sweep that something stops for a while in the middle; `stop` returns what ends that.

    Returns:
        How many trials have felt it.
    """
    with run_until_under_way(sweep, node) as process:
        with time_fault() as known:
            go_on = stop(process)
            let_last(seconds, process)
            go_on()
        assert process.wait(600) == 0, sweep.read_errors()
    return add_row(name, sweep, known)


def stopped(process: psutil.Process) -> Callable[[], None]:
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("who", ["driver", "trial", "raylet"])
def test_a_process(tmp_path: Path, empty_cluster: RayCluster, whole: Whole, who: str):
    cluster = empty_cluster
    _, node = cluster.start(2, **NODE)

    def stop(driver: subprocess.Popen[bytes]) -> Callable[[], None]:
        if who == "driver":
            return stopped(psutil.Process(driver.pid))
        return stopped(
            find_training_processes(sweep, node)[0] if who == "trial" else node.server("raylet")
        )

    sweep = build_slow_sweep(tmp_path, ASHA, cluster)
    hit = disturbed(sweep, node, stop, f"{who} stopped")
    assert hit or who == "raylet"  # those that run need none, and may be done before it is back
    check_recovery(cluster, sweep, whole["asha"])


def test_a_whole_node(tmp_path: Path, empty_cluster: RayCluster, whole: Whole):
    """As a hypervisor does that moves a machine, or a laptop that is closed."""
    cluster = empty_cluster
    _, node = cluster.start(2, **NODE)

    def stop(_: subprocess.Popen[bytes]) -> Callable[[], None]:
        node.pause()
        return node.resume

    sweep = build_slow_sweep(tmp_path, FIFO, cluster)
    assert disturbed(sweep, node, stop, "node stopped")
    check_recovery(cluster, sweep, whole["fifo"])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network() -> Iterator[None]:
    """A bridge at `NETWORK`.1, and a namespace at `NETWORK`.2 that a cable leads to."""
    try:
        ip("link", "add", "gdpo-bridge", "type", "bridge")
        ip("address", "add", f"{NETWORK}.1/24", "dev", "gdpo-bridge")
        ip("link", "set", "gdpo-bridge", "up")
        ip("netns", "add", "gdpo-node")
        ip(
            "link",
            "add",
            "gdpo-cable",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            "gdpo-node",
        )
        ip("link", "set", "gdpo-cable", "master", "gdpo-bridge", "up")
        for words in (("address", "add", f"{NETWORK}.2/24", "dev", "eth0"), *UP):
            ip("-n", "gdpo-node", *words)
        yield
    finally:
        for words in (("netns", "del", "gdpo-node"), ("link", "del", "gdpo-bridge")):
            with suppress(subprocess.CalledProcessError):
                ip(*words)


UP = (("link", "set", "eth0", "up"), ("link", "set", "lo", "up"))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
@pytest.mark.parametrize("seconds", [20, MINUTE])
def test_the_network_of_a_node(
    tmp_path: Path, no_authentication: None, whole: Whole, seconds: float
):
    """The node is in a network namespace, and its cable is pulled. Its disk is not."""
    given = {"ip": f"{NETWORK}.1", **VARIABLES}
    with (
        network(),
        make_short_directory() as folder,
        open_ray_cluster(folder, **given) as cluster,
    ):
        cluster.start_head(**NODE)
        node = cluster.add_node(f"{NETWORK}.2", ("ip", "netns", "exec", "gdpo-node"), **NODE)

        def cut(_: subprocess.Popen[bytes]) -> Callable[[], None]:
            ip("link", "set", "gdpo-cable", "down")
            return lambda: ip("link", "set", "gdpo-cable", "up")

        sweep = build_slow_sweep(tmp_path, FIFO, cluster)
        assert disturbed(sweep, node, cut, "network of a node cut", seconds)
        check_recovery(cluster, sweep, whole["fifo"])
