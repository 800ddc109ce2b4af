"""A process that trials share: one of Ray's trials trains several of ours, each in a thread.

The process asks for a trial whenever it has a free place, and passes on what its trials report. The
driver answers through the memory of the cluster's head before `tune.report` returns.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from ray import tune

from gdpo_tune.core import registry
from gdpo_tune.core.errors import DirectoryLostError, EngineDiedError
from gdpo_tune.core.system import clear_rendezvous
from gdpo_tune.tuning.attempts import (
    FINISHED,
    KEY,
    WAIT,
    Answer,
    AttemptConfig,
    AttemptError,
    AttemptFailure,
    Fatal,
    RunSettings,
    TrialMessage,
    TrialResult,
    unwrap_message,
    wrap_for_ray,
)
from gdpo_tune.tuning.ray.attempt import (
    Reporter,
    compute_memory_limit,
    describe_place,
    train_from_checkpoint,
    watch_directory,
)
from gdpo_tune.tuning.ray.head_store import read_shared_variables, take_answer

TRIAL_POLL_SECONDS = 0.5
"""Seconds between two requests for a trial while there is none."""


@dataclass(frozen=True)
class PlaceFree:
    """The process has room for another trial, and waits for the answer."""


@dataclass(frozen=True)
class FromTrial:
    """A message of a trial of the process."""

    name: str
    """Name of its attempt."""
    message: TrialMessage | AttemptFailure


def run_shared_process(config: dict[str, Any]) -> None:
    """Train trials side by side until there are no more.

    Raises:
        AttemptError: the process is no longer fit for trials.
    """
    read_shared_variables()
    # Now, and not with each trial: another one may be starting vLLM, which sets them.
    clear_rendezvous()
    SharedProcess(config[KEY]).run()


class SharedProcess:
    """Places for trials in this process."""

    def __init__(self, setup: RunSettings) -> None:
        self._setup = setup
        self._inbox: queue.SimpleQueue[tuple[FromTrial, threading.Event]] = queue.SimpleQueue()
        self._running: set[str] = set()
        self._trainer: Any = None
        self._building = threading.Lock()
        """Held while the first trial builds what all of them share."""
        self._served = 0
        self._is_broken = False  # True if an error may have left the process unusable

    def run(self) -> None:
        """Train trials until there are no more; see `run_shared_process`."""
        due, answer = 0.0, WAIT
        while self._running or answer != FINISHED:
            if answer != FINISHED and time.monotonic() >= due and self._has_place():
                answer = self._ask()
                is_trial = isinstance(answer, AttemptConfig)
                due = 0.0 if is_trial else time.monotonic() + TRIAL_POLL_SECONDS
                continue
            try:
                message, handled = self._inbox.get(timeout=TRIAL_POLL_SECONDS)
            except queue.Empty:
                continue
            end = message.message
            if isinstance(end, AttemptFailure) and end.cause == "shared_process":
                raise AttemptError("shared_process", end.reason)  # it counts for all of them
            tune.report(wrap_for_ray(message))
            handled.set()
            if isinstance(end, TrialResult | AttemptFailure):
                self._running.discard(message.name)
                due = 0.0
        if self._trainer is not None:
            self._trainer.close()

    def _has_place(self) -> bool:
        """Return whether another trial may begin; if none ever may, raise an `AttemptError`."""
        if not self._served:
            return True
        limit = compute_memory_limit(self._setup.cpus, self._setup.gpus)
        is_unfit = self._is_broken or psutil.Process().memory_info().rss > limit
        if is_unfit and not self._running:
            reason = "the process has grown too large, or is broken"
            raise AttemptError("needs_new_process", reason)
        return not is_unfit and len(self._running) < self._setup.trials_per_process

    def _ask(self) -> AttemptConfig | Answer:
        """Ask the driver for a trial, and begin it."""
        tune.report(wrap_for_ray(PlaceFree()))
        name, answer = pickle.loads(take_answer(tune.get_context().get_trial_id()))
        if isinstance(answer, AttemptConfig):
            self._served += 1
            self._running.add(name)
            self._send(name, describe_place(), wait=False)
            threading.Thread(target=self._run, args=(name, answer), name=name, daemon=True).start()
        return answer

    def _send(self, name: str, message: Any, *, wait: bool = True) -> None:
        """Pass a message on, and wait until the driver has handled it."""
        handled = threading.Event()
        self._inbox.put((FromTrial(name, message), handled))
        if wait:
            handled.wait()

    def _run(self, name: str, attempt: AttemptConfig) -> None:
        def train(trial: Any, **options: Any) -> Any:
            with self._building:
                if self._trainer is None:
                    self._trainer = registry.load(self._setup.train)(self._setup.trials_per_process)
            return self._trainer.train(trial, **options)

        end: Any
        try:
            reporter = partial(_SharedReporter, attempt, partial(self._send, name))
            with watch_directory(attempt.setup):
                end = train_from_checkpoint(attempt, reporter, train)
        except DirectoryLostError as error:
            end = Fatal(error)
        except AttemptError as error:
            self._is_broken |= error.cause == "needs_new_process"
            traces = traceback.format_exc()
            end = AttemptFailure(error.cause, str(error), traces, outage=error.outage)
        except BaseException as error:  # noqa: BLE001 - an exit, too, ends this trial alone
            reason, traces = f"{type(error).__name__}: {error}", traceback.format_exc()
            has_lost_gpu = "CUDA error" in str(error)
            self._is_broken |= has_lost_gpu or isinstance(error, EngineDiedError)
            end = AttemptFailure("error", reason, traces)
            if has_lost_gpu and len(self._running) > 1:
                # No trial here can compute any more, and nothing tells whose fault it is.
                end = AttemptFailure("shared_process", f"its process ended: {reason}", traces)
        self._send(name, end, wait=False)


class _SharedReporter(Reporter):
    """The `report` of a trial that shares its process."""

    def __init__(self, attempt: AttemptConfig, pass_on: Any) -> None:
        super().__init__(attempt)
        self._pass_on = pass_on

    def send(self, result: dict[str, Any]) -> None:
        self._pass_on(unwrap_message(result))
