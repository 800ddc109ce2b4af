"""Functions in processes of their own, with a deadline and a file that keeps what they print.

A step that dies, hangs or takes all memory then ends alone. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import GdpoTuneError

GRACE = 5.0
"""Seconds that a process gets to end after its answer."""


class StepError(Exception):
    """A function in its own process raised, died, or ran out of its time."""


class OutOfTimeError(StepError):
    """The time of the whole check is over."""


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
        self.logs = logs
        self._deadline = time.monotonic() + seconds
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def read_remaining(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def find_log(self, step: str) -> Path:
        """Return the file with what a step prints."""
        return self.logs / f"{step.replace(' ', '_')}.log"

    def start(self, step: str, function: str, *arguments: Any) -> RunningFunction:
        """Start `module:function` in a new process, whose output is added to the step's log."""
        ours, theirs = self._context.Pipe(duplex=False)
        log = str(self.find_log(step))
        process = self._context.Process(target=_serve, args=(theirs, log, function, arguments))
        process.start()
        theirs.close()
        return RunningFunction(process, ours)

    def call(self, step: str, function: str, *arguments: Any, seconds: float) -> Any:
        """Return the result of `module:function(*arguments)`, computed in a new process.

        Raises:
            StepError: it raised, died, or took more than `seconds`; the message is one line.
            OutOfTimeError: the time of the whole check is over.
        """
        allowed = min(seconds, self.read_remaining())
        running = self.start(step, function, *arguments)
        try:
            return running.wait(allowed)
        except TimeoutError:
            if allowed < seconds:
                raise OutOfTimeError("the time of the whole check was over") from None
            raise StepError(f"no end after {seconds:.0f} s: see {self.find_log(step)}") from None
        finally:
            running.kill()


class RunningFunction:
    """A function that runs in its own process."""

    def __init__(self, process: Any, answers: Connection) -> None:
        self._process = process
        self._answers = answers

    def wait(self, seconds: float) -> Any:
        """Return the function's result.

        Raises:
            TimeoutError: there is none after so many seconds.
            StepError: the function raised, or its process died.
        """
        if not self._answers.poll(max(seconds, 0)):
            raise TimeoutError
        try:
            kind, answer = self._answers.recv()
        except EOFError:
            self._process.join(GRACE)
            raise StepError(describe_exit(self._process.exitcode)) from None
        if kind == "error":
            raise StepError(answer)
        self._process.join(GRACE)
        return answer

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not have made its group yet
        self._process.join(GRACE)
        self._answers.close()


def describe_exit(status: int | None) -> str:
    """Describe how a process ended that gave no answer."""
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _serve(answers: Connection, log: str, function: str, arguments: Sequence[Any]) -> None:
    """Run a function in this new process and send its result or its error."""
    os.setsid()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    module, _, name = function.partition(":")
    try:
        answer = ("result", getattr(import_module(module), name)(*arguments))
    except Exception as error:  # noqa: BLE001 - the check reports every error of a step
        traceback.print_exc()
        answer = ("error", describe_step_error(error))
    answers.send(answer)
    answers.close()


def describe_step_error(error: Exception) -> str:
    """Return an error in one line: the first of several, but all of one meant for the user."""
    if isinstance(error, GdpoTuneError):
        return "; ".join(line.strip() for line in str(error).splitlines())
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, StepError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
