"""A Ray cluster of several nodes on this machine, each with processes and a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import GcsClient

from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT
from tests.support.ray_heads import wait_for_dashboard

RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block")
PORTS = (
    *("node-manager-port", "object-manager-port", "dashboard-agent-listen-port"),
    *("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port"),
)
"""Of each node; the defaults would be those of any other cluster on this machine."""
PATIENCE = 90.0


@dataclass
class RayNode:
    """`ray start` and everything below it."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    id: str = ""
    _stopped: list[psutil.Process] = field(default_factory=list)

    def processes(self) -> list[psutil.Process]:
        """Those that run now: its servers, and the trials and drivers on it.

        Most are of its session, and jobs have sessions of their own below it.
        """
        found = {p.pid: p for p in psutil.process_iter() if read_session(p.pid) == self.process.pid}
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            found |= {process.pid: process for process in below}
        if self.process.poll() is not None:  # it has noticed the loss of a server, and ended
            found.pop(self.process.pid, None)
        return list(found.values())

    def server(self, name: str) -> psutil.Process:
        """Its `raylet` or its `gcs_server`."""
        (found,) = [process for process in self.processes() if read_name(process) == name]
        return found

    def kill(self) -> None:
        """`kill -9` of all of it at once, as the loss of its machine is."""
        processes = self.processes()
        for process in processes:  # so that none hears of the end of another
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        deadline = time.monotonic() + PATIENCE
        while not all(map(is_dead, processes)):
            assert time.monotonic() < deadline, processes
            time.sleep(0.02)

    def pause(self) -> None:
        """Stop the clock of all of it, as a hypervisor does."""
        self._stopped = self.processes()
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on, from where it was."""
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._stopped.clear()


class RayCluster:
    """Nodes that `ray start` begins, the head first."""

    def __init__(self, folder: Path, ip: str = "127.0.0.1", **variables: str) -> None:
        """
        Args:
            folder: for what Ray writes; short, since sockets have short names.
            ip: of the head.
            variables: of every node's environment.
        """
        self.ip = ip
        self.port, self._dashboard = find_free_port(), find_free_port()
        self.address = f"{ip}:{self.port}"
        self.url = f"http://{ip}:{self._dashboard}"
        self.nodes: list[RayNode] = []
        self._folder = folder
        self._count = 0
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
        self._environment |= {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **variables,
        }

    def start(self, count: int, **resources: float) -> list[RayNode]:
        """Start the head and others beside it, each with `cpus` and `gpus`.

        They wait for the head by themselves, so all are up sooner than one after the other.
        """
        begun = [self._start("head", self._as_head(), resources)]
        begun += [self._start("node", self._as_node(), resources) for _ in range(count - 1)]
        return [self._wait_for(node) for node in begun]

    def start_head(
        self, within: Sequence[str] = (), *, dashboard: bool = False, **resources: float
    ) -> RayNode:
        """Start the head, always at the same address; `within` and `resources`: of `add_node`."""
        node = self._start("head", self._as_head(dashboard), resources, within)
        if dashboard:
            wait_for_dashboard(self.url, node.process, node.folder / "out.txt")
        return self._wait_for(node)

    def add_node(self, ip: str = "", within: Sequence[str] = (), **resources: float) -> RayNode:
        """Start another node.

        Args:
            ip: its address; empty: that of the head.
            within: what comes before the command, such as `ip netns exec NAME` or `env NAME=VALUE`.
            resources: `cpus` and `gpus`.
        """
        return self._wait_for(self._start("node", self._as_node(ip), resources, within))

    def alive(self) -> dict[str, str]:
        """Name of each node that the head takes for alive, and its id."""
        found = GcsClient(address=self.address).get_all_node_info(timeout=10)
        return {about.node_name: about.node_id.hex() for about in found.values() if not about.state}

    def stop(self) -> None:
        """End everything, those that were stopped as well."""
        for node in self.nodes:
            node.kill()
        self.nodes.clear()

    def _as_head(self, dashboard: bool = False) -> list[str]:
        return [
            *("--head", f"--port={self.port}", f"--node-ip-address={self.ip}"),
            *(f"--dashboard-host={self.ip}", f"--dashboard-port={self._dashboard}"),
            f"--include-dashboard={str(dashboard).lower()}",
        ]

    def _as_node(self, ip: str = "") -> list[str]:
        return [f"--address={self.address}", f"--node-ip-address={ip or self.ip}"]

    def _start(
        self,
        kind: str,
        options: Sequence[str],
        resources: dict[str, float],
        within: Sequence[str] = (),
    ) -> RayNode:
        self._count += 1
        name = f"{kind}{self._count}"
        folder = self._folder / name
        folder.mkdir()
        command = [
            *(*within, *RAY, *options, f"--node-name={name}", f"--temp-dir={folder}"),
            *(f"--{port}={find_free_port()}" for port in PORTS),
            *(f"--num-{what}={count}" for what, count in resources.items()),
            # workers find their own: two nodes of one machine would hand out the same ones
            *("--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=134217728"),
        ]
        with (folder / "out.txt").open("w") as out:
            process = subprocess.Popen(
                command, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
        self.nodes.append(RayNode(name, folder, process))
        return self.nodes[-1]

    def _wait_for(self, node: RayNode) -> RayNode:
        deadline = time.monotonic() + PATIENCE
        while not node.id:
            out = (node.folder / "out.txt").read_text()
            assert node.process.poll() is None, out
            assert time.monotonic() < deadline, out
            with suppress(Exception):  # Ray has several for a head that is not there yet
                node.id = self.alive().get(node.name, "")
            time.sleep(0.1)
        return node


@contextmanager
def make_short_directory() -> Iterator[Path]:
    """A temporary folder with a short name: names of sockets have 107 characters at most."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def open_ray_cluster(
    folder: Path, make: Callable[..., RayCluster] = RayCluster, **given: Any
) -> Iterator[RayCluster]:
    """A cluster without nodes yet; all that it gets are ended at the end."""
    cluster = make(folder, **given)
    try:
        yield cluster
    finally:
        cluster.stop()


def read_session(pid: int) -> int:
    """The session of a process; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def is_dead(process: psutil.Process) -> bool:
    """Whether a process has ended; it may be long until somebody buries an orphan."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read_name(process: psutil.Process) -> str:
    """The name of a process; empty if it is gone."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def read_command(process: psutil.Process) -> str:
    """What a process was called with, or calls itself; empty if it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
