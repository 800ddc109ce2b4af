"""A real Ray cluster of one node on this machine, with its own temporary directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT


@contextmanager
def start_ray_head(directory: Path, **variables: str) -> Iterator[str]:
    """Start a cluster of one node with these environment variables; yield its dashboard's URL."""
    port, dashboard, agent = find_free_port(), find_free_port(), find_free_port()
    environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
        *("start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=2"),
        *("--object-store-memory=134217728", f"--temp-dir={directory}", "--include-dashboard=true"),
        f"--dashboard-agent-listen-port={agent}",  # at the default port, a second head has no agent
    ]
    with (
        (directory / "out.txt").open("w") as out,
        subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        ) as server,
    ):
        try:
            url = f"http://127.0.0.1:{dashboard}"
            wait_for_dashboard(url, server, directory / "out.txt")
            yield url
        finally:
            with suppress(psutil.NoSuchProcess):
                below = psutil.Process(server.pid).children(recursive=True)
                for process in [*below, psutil.Process(server.pid)]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()


def wait_for_dashboard(url: str, server: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        assert server.poll() is None, out.read_text()
        assert time.monotonic() < deadline, out.read_text()
        try:
            urllib.request.urlopen(f"{url}/api/version", timeout=2).close()
            return
        except urllib.error.HTTPError as error:  # it answers, and requires a token
            error.close()
            return
        except OSError:
            time.sleep(0.2)
