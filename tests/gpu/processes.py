"""Functions in processes of their own: one that dies, hangs or takes all memory ends alone."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

DUMP_BEFORE = 2.0
"""Seconds before the end of its time at which a process writes the stacks of its threads."""
GRACE = 5.0
"""Seconds that a process gets to end after its answer."""
OVER = "the time of the whole check was over"


class StepError(Exception):
    """A function raised, its process died, or it ran out of its time."""


class Processes:
    """Processes that run functions one after the other, until a common deadline."""

    def __init__(self, logs: Path, seconds: float, preload: Sequence[str] = ()) -> None:
        """Start the clock.

        Args:
            logs: directory of one file for each step.
            seconds: time of all functions together.
            preload: modules that all processes inherit from one; they must not touch a GPU, because
                CUDA does not survive a fork.
        """
        self._logs = logs
        self._deadline = time.monotonic() + seconds
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def read_remaining(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def find_log(self, step: str) -> Path:
        """Return the file with what a step prints."""
        return self._logs / f"{step}.log"

    @contextmanager
    def start(self, step: str, function: str, *arguments: Any, seconds: float):
        """Run `module:function` beside a block, and kill it and what it started at its end."""
        ours, theirs = self._context.Pipe(duplex=False)
        log = str(self.find_log(step))
        process = self._context.Process(
            target=_serve, args=(theirs, log, function, arguments, seconds)
        )
        process.start()
        theirs.close()
        try:
            yield process, ours
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have made its group yet
            process.join(GRACE)
            ours.close()

    def call(self, step: str, function: str, *arguments: Any, seconds: float) -> Any:
        """Return the result of `module:function(*arguments)`, computed in a new process.

        The test is skipped where the time of the whole check is over.

        Raises:
            StepError: it raised, died, or took more than `seconds`.
        """
        allowed = min(seconds, self.read_remaining())
        with self.start(step, function, *arguments, seconds=allowed) as (process, answers):
            if not answers.poll(max(allowed, 0)):
                if allowed < seconds:
                    pytest.skip(OVER)
                raise StepError(f"no end after {seconds:.0f} s: see {self.find_log(step)}")
            try:
                kind, answer = answers.recv()
            except EOFError:
                process.join(GRACE)
                raise StepError(f"its process ended with status {process.exitcode}") from None
            process.join(GRACE)
        if kind == "error":
            raise StepError(answer)
        return answer


def _serve(answers: Any, log: str, function: str, arguments: Sequence[Any], seconds: float) -> None:
    """Run a function in this new process and send its result or its error."""
    os.setsid()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(max(seconds - DUMP_BEFORE, 1), file=2)
    module, _, name = function.partition(":")
    try:
        answer = ("result", getattr(import_module(module), name)(*arguments))
    except BaseException:  # noqa: BLE001 - the check reports every error of a step
        traceback.print_exc()
        answer = ("error", traceback.format_exc())
    answers.send(answer)
    answers.close()
