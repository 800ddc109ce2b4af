"""Starts a process of the sandbox and talks to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import SandboxUnavailable
from .inside.frames import read_exactly, read_frame
from .verdicts import Infra

_LAUNCHER = Path(__file__).with_name("launch.py")
_NEEDED_TO_START = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Without these an interpreter outside the usual places may not find its own files."""
_START_SECONDS = 60.0
_END_SECONDS = 5.0
_MAX_REPORT_BYTES = 1 << 26


class SandboxProcess:
    """A zygote or a judge.

    It is started anew, never forked, so nothing of the trainer's memory, environment or
    descriptors is in it. It dies with the thread that makes this object.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self.layers: tuple[str, ...] = ()
        """What it is locked in, once it is."""
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = _launch(role, theirs.fileno())
        except OSError as error:
            raise SandboxUnavailable(f"start: no {role} process: {error}") from error

    def wait_until_locked(self) -> None:
        """Wait until it may be sent requests.

        Raises:
            SandboxUnavailable: it could not be locked; the message names the step.
        """
        self._socket.settimeout(_START_SECONDS)
        try:
            hello = json.loads(read_frame(self._socket.recv, _MAX_REPORT_BYTES))
        except (EOFError, OSError) as error:
            raise SandboxUnavailable(
                f"start: the {self._role} process ended before it was locked: {error!r}"
            ) from error
        if "failed" in hello:
            raise SandboxUnavailable(hello["failed"])
        self.layers = tuple(hello["layers"])

    def send(self, data: bytes, descriptor: int) -> None:
        """Send a request with a descriptor.

        Raises:
            Infra: the process has gone.
        """
        try:
            sent = socket.send_fds(self._socket, [data], [descriptor])
            self._socket.sendall(data[sent:])
        except OSError as error:
            raise Infra(f"the {self._role} process does not take requests: {error}") from error

    def receive(self, count: int, seconds: float) -> bytes:
        """Receive exactly `count` bytes.

        Raises:
            Infra: the process has gone, or does not answer in time.
        """
        self._socket.settimeout(seconds)
        try:
            return read_exactly(self._socket.recv, count)
        except (EOFError, OSError) as error:
            raise Infra(f"the {self._role} process does not answer: {error!r}") from error

    def receive_report(self, seconds: float) -> dict[str, Any]:
        """Receive one JSON object.

        Raises:
            Infra: the process has gone, or does not answer in time.
        """
        self._socket.settimeout(seconds)
        try:
            return json.loads(read_frame(self._socket.recv, _MAX_REPORT_BYTES))
        except (EOFError, OSError) as error:
            raise Infra(f"the {self._role} process does not answer: {error!r}") from error

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it now; whatever it forked dies with it."""
        self._socket.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _launch(role: str, descriptor: int) -> subprocess.Popen[bytes]:
    # NOTE: not -I, which would ignore the hash seed: a candidate that goes through a set must
    # do the same in every run. The environment, of which -I protects, is empty.
    options = ["-s", "-S", "-P"]
    environment = {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ}
    return subprocess.Popen(
        [sys.executable, *options, str(_LAUNCHER), role, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "PYTHONHASHSEED": "0"},
        cwd="/",
        pass_fds=[descriptor],
        # NOTE: Ctrl-C is for the trainer, which may still need verdicts to finish.
        start_new_session=True,
    )
