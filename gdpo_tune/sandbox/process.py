"""A zygote as the trainer sees it: start it, and exchange messages with it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ..core.errors import SandboxUnavailable
from .guest.protocol import read_exactly, read_frame
from .jobs import InfraFault

_LAUNCHER = Path(__file__).with_name("launch.py")
_NEEDED_TO_START = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Without these an interpreter outside the usual directories may not find its own files."""
_ENVIRONMENT = {
    # NOTE: a candidate that iterates over a set must do the same in every run.
    "PYTHONHASHSEED": "0",
    # NOTE: symbols that are resolved late would be resolved again in every fork.
    "LD_BIND_NOW": "1",
    # NOTE: a fork copies one thread only; a library that had more would wait for them forever.
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
}
ADVICE = "code runs only where Linux can isolate it: docs/sandbox.md lists causes and ways out"
"""Advice where a machine cannot isolate a process."""
_FEWER_FILES = "; write fewer sandbox.workers, or raise the limit of open files (ulimit -n)"


class SandboxProcess:
    """A zygote: a new process, with nothing of the trainer's memory or descriptors.

    It is locked when this object is made, and dies with the thread that makes it. It loads
    `modules` besides those of the standard library.

    Raises:
        SandboxUnavailable: it cannot be started or locked, or a module is not installed; the
            message names the step.
    """

    def __init__(self, modules: tuple[str, ...] = (), *, isolated: bool = True) -> None:
        arguments = [part for module in modules for part in (module, _find_directory(module))]
        try:
            with contextlib.ExitStack() as undo:
                self._socket, theirs = map(undo.enter_context, _open_sockets())
                self._process = _launch(theirs.fileno(), isolated, arguments)
                undo.pop_all()
                theirs.close()
        except OSError as error:
            hint = _FEWER_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise SandboxUnavailable(f"start: no zygote process: {error}{hint}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(self.kill)
            self.layers = self._wait_until_locked()
            """Layers of isolation."""
            undo.pop_all()

    def _wait_until_locked(self) -> tuple[str, ...]:
        try:
            hello = json.loads(self._read(partial(read_frame, limit=1 << 26), seconds=60.0))
        except InfraFault as error:
            raise SandboxUnavailable(
                f"start: the zygote process ended before it was locked: {error}"
            ) from error
        if "failed" in hello:
            hint = "" if hello["failed"].startswith("modules:") else f"; {ADVICE}"
            raise SandboxUnavailable(hello["failed"] + hint)
        return tuple(hello["layers"])

    def send(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Send a request with descriptors; raise `InfraFault` if the process has ended."""
        try:
            sent = socket.send_fds(self._socket, [data], descriptors)
            self._socket.sendall(data[sent:])
        except OSError as error:
            raise InfraFault(f"the zygote process does not take requests: {error}") from error

    def receive(self, count: int, seconds: float) -> bytes:
        """Receive exactly `count` bytes; raise `InfraFault` if they do not come in time."""
        return self._read(partial(read_exactly, count=count), seconds)

    def _read(self, read: Callable[[Callable[[int], bytes]], bytes], seconds: float) -> bytes:
        self._socket.settimeout(seconds)
        try:
            return read(self._socket.recv)
        except (EOFError, OSError) as error:
            raise InfraFault(f"the zygote process does not answer: {error!r}") from error

    def interrupt(self) -> None:
        """Shut the connection down, so that the process ends; from any thread."""
        # NOTE: closing is not enough, because a fork of the trainer may hold the connection too.
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        self.interrupt()
        self._socket.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it now; all of its forks die with it."""
        self._socket.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _open_sockets() -> Iterator[socket.socket]:
    """Open both ends of a connection apart from the standard streams, which a start replaces."""
    first, second = socket.socketpair()
    with first, second:
        for end in (first, second):
            number = fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
            yield socket.socket(fileno=number)


def _find_directory(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError) as error:
        raise SandboxUnavailable(f"modules: {module!r} is not a module: {error}") from error
    if spec is None:
        raise SandboxUnavailable(f"modules: {module!r} is not installed here")
    locations = list(spec.submodule_search_locations or ())
    return os.path.dirname(locations[0] if locations else spec.origin or "")


def _launch(descriptor: int, isolated: bool, modules: list[str]) -> subprocess.Popen[bytes]:
    # NOTE: not -I, which would ignore the hash seed. It protects from the environment, which is
    # empty here.
    options = ["-s", "-S", "-P"]
    environment = {name: os.environ[name] for name in _NEEDED_TO_START if name in os.environ}
    return subprocess.Popen(
        [
            *(sys.executable, *options, str(_LAUNCHER)),
            *(str(descriptor), str(os.getpid()), str(int(isolated)), *modules),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, **_ENVIRONMENT},
        cwd="/",
        pass_fds=[descriptor],
        # NOTE: Ctrl-C is for the trainer, which may still need verdicts to finish.
        start_new_session=True,
    )
