"""A Ray cluster of several nodes on this machine, each with its own processes and directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import GcsClient

from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT

RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block")
PORTS = (
    *("node-manager-port", "object-manager-port", "dashboard-agent-listen-port"),
    *("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port"),
)
"""Ports of each node; the defaults would clash with other clusters on this machine."""
PATIENCE = 90.0


@dataclass
class RayNode:
    """`ray start` and everything below it."""

    name: str
    directory: Path
    process: subprocess.Popen[bytes]
    id: str = ""
    _stopped: list[psutil.Process] = field(default_factory=list)

    def list_processes(self) -> list[psutil.Process]:
        """List the running processes of the node: servers, trials and drivers.

        Most belong to its session; jobs have their own sessions below it.
        """
        processes = {
            p.pid: p for p in psutil.process_iter() if read_session(p.pid) == self.process.pid
        }
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            processes |= {process.pid: process for process in below}
        if self.process.poll() is not None:  # it has noticed the loss of a server, and ended
            processes.pop(self.process.pid, None)
        return list(processes.values())

    def find_server(self, name: str) -> psutil.Process:
        (server,) = [process for process in self.list_processes() if read_name(process) == name]
        return server

    def kill(self) -> None:
        """Kill all processes at once, like the loss of the machine."""
        processes = self.list_processes()
        for process in processes:  # so that none notices the end of another
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        deadline = time.monotonic() + PATIENCE
        while not all(map(has_ended, processes)):
            assert time.monotonic() < deadline, processes
            time.sleep(0.02)

    def pause(self) -> None:
        """Stop all processes, like a hypervisor that pauses a machine."""
        self._stopped = self.list_processes()
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all stopped processes."""
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._stopped.clear()


class RayCluster:
    """Nodes that `ray start` starts, the head first."""

    def __init__(self, directory: Path, ip: str = "127.0.0.1", **variables: str) -> None:
        """
        Args:
            directory: for files of Ray; a short path, since names of sockets are short.
            ip: address of the head.
            variables: environment variables of every node.
        """
        self.ip = ip
        self.port, self._dashboard = find_free_port(), find_free_port()
        self.address = f"{ip}:{self.port}"
        self.url = f"http://{ip}:{self._dashboard}"
        self.nodes: list[RayNode] = []
        self._folder = directory
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
        """Start the head and `count - 1` other nodes, each with `cpus` and `gpus`.

        The nodes wait for the head themselves, so they start in parallel.
        """
        begun = [self._start("head", self._build_head_options(), resources)]
        begun += [
            self._start("node", self._build_node_options(), resources) for _ in range(count - 1)
        ]
        return [self._wait_for(node) for node in begun]

    def start_head(
        self, prefix: Sequence[str] = (), *, dashboard: bool = False, **resources: float
    ) -> RayNode:
        """Start the head, always at the same address; `prefix` and `resources` as in `add_node`."""
        node = self._start("head", self._build_head_options(dashboard), resources, prefix)
        if dashboard:
            self._wait_for_dashboard(node)
        return self._wait_for(node)

    def _wait_for_dashboard(self, node: RayNode) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            out = (node.directory / "out.txt").read_text()
            assert node.process.poll() is None, out
            assert time.monotonic() < deadline, out
            try:
                urllib.request.urlopen(f"{self.url}/api/version", timeout=2).close()
                return
            except urllib.error.HTTPError as error:  # it answers, and requires a token
                error.close()
                return
            except OSError:
                time.sleep(0.2)

    def add_node(self, ip: str = "", prefix: Sequence[str] = (), **resources: float) -> RayNode:
        """Start another node.

        Args:
            ip: its address; empty: that of the head.
            prefix: words before the command, such as `ip netns exec NAME` or `env NAME=VALUE`.
            resources: `cpus` and `gpus`.
        """
        return self._wait_for(self._start("node", self._build_node_options(ip), resources, prefix))

    def list_alive_nodes(self) -> dict[str, str]:
        """Return name -> id of each node that the head considers alive."""
        nodes = GcsClient(address=self.address).get_all_node_info(timeout=10)
        return {node.node_name: node.node_id.hex() for node in nodes.values() if not node.state}

    def stop(self) -> None:
        """Kill all nodes, also stopped ones."""
        for node in self.nodes:
            node.kill()
        self.nodes.clear()

    def _build_head_options(self, dashboard: bool = False) -> list[str]:
        return [
            *("--head", f"--port={self.port}", f"--node-ip-address={self.ip}"),
            *(f"--dashboard-host={self.ip}", f"--dashboard-port={self._dashboard}"),
            f"--include-dashboard={str(dashboard).lower()}",
        ]

    def _build_node_options(self, ip: str = "") -> list[str]:
        return [f"--address={self.address}", f"--node-ip-address={ip or self.ip}"]

    def _start(
        self,
        kind: str,
        options: Sequence[str],
        resources: dict[str, float],
        prefix: Sequence[str] = (),
    ) -> RayNode:
        self._count += 1
        name = f"{kind}{self._count}"
        directory = self._folder / name
        directory.mkdir()
        command = [
            *(*prefix, *RAY, *options, f"--node-name={name}", f"--temp-dir={directory}"),
            *(f"--{port}={find_free_port()}" for port in PORTS),
            *(f"--num-{resource}={count}" for resource, count in resources.items()),
            # workers find their own: two nodes of one machine would hand out the same ones
            *("--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=134217728"),
        ]
        with (directory / "out.txt").open("w") as out:
            process = subprocess.Popen(
                command, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
        self.nodes.append(RayNode(name, directory, process))
        return self.nodes[-1]

    def _wait_for(self, node: RayNode) -> RayNode:
        deadline = time.monotonic() + PATIENCE
        while not node.id and self._environment["RAY_AUTH_MODE"] == "disabled":
            out = (node.directory / "out.txt").read_text()
            assert node.process.poll() is None, out
            assert time.monotonic() < deadline, out
            with suppress(Exception):  # Ray raises several errors while the head starts
                node.id = self.list_alive_nodes().get(node.name, "")
            time.sleep(0.1)
        return node


@contextmanager
def make_short_directory() -> Iterator[Path]:
    """Make a temporary directory; its path is short, since sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def open_ray_cluster(
    directory: Path, make: Callable[..., RayCluster] = RayCluster, **options: Any
) -> Iterator[RayCluster]:
    cluster = make(directory, **options)
    try:
        yield cluster
    finally:
        cluster.stop()


def read_session(pid: int) -> int:
    """Return the session of a process; 0 if the process does not exist."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; an orphan may stay a zombie for long."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read_name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def read_command(process: psutil.Process) -> str:
    """Return the command line or title of a process; empty if the process does not exist."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
