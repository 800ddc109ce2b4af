"""Common ways to run a candidate, with which `benchmarks/sandbox.py` compares the sandbox.

Every side gets the same candidates and returns one word for each: passed, failed or timeout.
`lanes` candidates run side by side, in threads of this process that wait for processes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from gdpo_tune.sandbox import Job, Limits, Sandbox
from gdpo_tune.sandbox.guest.modules import IMPORTED
from gdpo_tune.sandbox.guest.protocol import pack, read_exactly

LIMIT_SECONDS = 0.5
MEMORY_BYTES = Limits().memory_bytes


@dataclass(frozen=True)
class Candidate:
    """Program, its tests, and the right verdict."""

    code: str
    asserts: tuple[str, ...]
    expected: str

    def build_program(self) -> str:
        """Build one program of code and tests, for sides that grade in the candidate's process."""
        return "\n".join([self.code, *self.asserts])


class Side(Protocol):
    """One way to run candidates."""

    def run(self, candidates: Sequence[Candidate]) -> list[str]:
        """Return one word for each candidate: passed, failed or timeout."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


class InThreads:
    """Side that runs candidates one by one in each of `lanes` threads."""

    def __init__(self, run_one: Callable[[Candidate], str], lanes: int) -> None:
        self._run_one = run_one
        self._threads = ThreadPoolExecutor(lanes)

    def run(self, candidates: Sequence[Candidate]) -> list[str]:
        """See `Side`."""
        return list(self._threads.map(self._run_one, candidates))

    def close(self) -> None:
        """See `Side`."""
        self._threads.shutdown()


class PythonC(InThreads):
    """`python -c program`: a new interpreter for each candidate, no isolation; wall clock.

    It runs from an empty virtual environment, because `.pth` files of installed packages slow
    every start of an interpreter.
    """

    def __init__(self, lanes: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._python = self._choose_python(Path(self._directory.name))
        super().__init__(self._run, lanes)

    def _choose_python(self, directory: Path) -> str:
        venv.create(directory, symlinks=True)
        return str(directory / "bin" / "python")

    def _run(self, candidate: Candidate) -> str:
        null = subprocess.DEVNULL
        command = [self._python, "-c", candidate.build_program()]
        with subprocess.Popen(command, stdin=null, stdout=null, stderr=null) as process:
            # NOTE: `subprocess` polls in steps of up to 50 ms, which would cost this side a third
            # of its speed.
            handle = os.pidfd_open(process.pid)
            ended, _, _ = select.select([handle], [], [], LIMIT_SECONDS)
            os.close(handle)
            if not ended:
                process.kill()
                return "timeout"
            return "failed" if process.wait() else "passed"

    def close(self) -> None:
        """See `Side`."""
        super().close()
        self._directory.cleanup()


class PythonCHere(PythonC):
    """`python -c program` in the current environment, with all of its packages."""

    def _choose_python(self, directory: Path) -> str:
        return sys.executable


class Fork(InThreads):
    """Minimal fork: a warm process forks a child with limits, which grades itself; CPU clock.

    It is the fastest way to run a candidate in its own process: no isolation, no judge. The warm
    process has the imports of a zygote, and skips `site` as a zygote does.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(self._run, lanes)
        self._free: SimpleQueue[_WarmProcess] = SimpleQueue()
        self._all = [_WarmProcess() for _ in range(lanes)]
        for process in self._all:
            self._free.put(process)

    def _run(self, candidate: Candidate) -> str:
        process = self._free.get()
        try:
            return process.ask(candidate.build_program())
        finally:
            self._free.put(process)

    def close(self) -> None:
        """See `Side`."""
        super().close()
        for process in self._all:
            process.close()


_WARM = f"""
import gc, importlib, os, random, resource, signal, socket, struct, sys
for name in {IMPORTED.split()}:
    importlib.import_module(name)
limits = {LIMIT_SECONDS}, {MEMORY_BYTES}
trainer = socket.socket(fileno=int(sys.argv[1]))

def attempt(program):
    resource.setrlimit(resource.RLIMIT_AS, (limits[1], limits[1]))
    signal.setitimer(signal.ITIMER_PROF, limits[0])
    gc.enable()
    random.seed(0)
    try:
        exec(program, {{}})
        os._exit(0)
    finally:
        os._exit(1)

gc.collect()
gc.disable()
gc.freeze()
while header := trainer.recv(4):
    program = trainer.recv(struct.unpack("=I", header)[0], socket.MSG_WAITALL)
    child = os.fork()
    if child == 0:
        attempt(program)
    trainer.sendall(struct.pack("=i", os.waitpid(child, 0)[1]))
"""


class _WarmProcess:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-c", _WARM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def ask(self, program: str) -> str:
        self._socket.sendall(pack(program.encode()))
        status = int.from_bytes(read_exactly(self._socket.recv, 4), sys.byteorder)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return "timeout"
        return "failed" if status else "passed"

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Boxed:
    """One of our sandboxes; CPU clock, backed by a wall clock."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def run(self, candidates: Sequence[Candidate]) -> list[str]:
        """See `Side`."""
        limits = Limits(cpu_seconds=LIMIT_SECONDS, memory_bytes=MEMORY_BYTES)
        jobs = [Job(each.code, asserts=each.asserts, limits=limits) for each in candidates]
        return [result.status for result in self.sandbox.run_batch(jobs)]

    def close(self) -> None:
        """See `Side`."""
        self.sandbox.close()
