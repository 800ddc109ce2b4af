"""Process that trains several trials at once, each in a thread: see `pack_proxy` for its callers.

The process is an actor of Ray that Ray starts again when it dies. It imports torch with its first
trial, so that it answers early.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import ray

from gdpo_tune.core import registry
from gdpo_tune.core.errors import EngineDiedError
from gdpo_tune.core.system import clear_rendezvous
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome
from gdpo_tune.tuning.ray.messages import (
    HOST_DIED,
    AttemptConfig,
    AttemptError,
    Setup,
    TrialMessage,
    TrialPlaced,
    TrialResult,
    unpack_message,
)
from gdpo_tune.tuning.ray.reporter import Reporter
from gdpo_tune.tuning.ray.variables import read_shared_variables

RESERVED_SECONDS = 10.0
"""Time for which no trial enters after one has asked to be alone; it asks again meanwhile."""
FAREWELL_SECONDS = 1.0
"""Time for trials to hear why their process ends."""
LOOK_SECONDS = 1.0
"""Seconds between two looks whether the driver's answer still matters."""


class Channel:
    """Messages of one trial to its proxy, each of which waits until the driver has handled it."""

    def __init__(self) -> None:
        self.is_abandoned = False
        """True if the proxy is gone, so that the trial has to end."""
        self._messages: queue.SimpleQueue[tuple[TrialMessage | Exception, threading.Event]] = (
            queue.SimpleQueue()
        )
        self._handled = threading.Event()
        """Of the last message that the proxy has taken."""

    def send(self, message: TrialMessage) -> None:
        """Pass a message on, and wait until it was handled."""
        handled = threading.Event()
        self._messages.put((message, handled))
        while not handled.wait(LOOK_SECONDS) and not self.is_abandoned:
            pass

    def end(self, result: TrialResult | Exception) -> None:
        """Pass on the end of the trial, for which nobody waits."""
        self._messages.put((result, threading.Event()))

    def take(self) -> TrialMessage:
        """Return the next message once there is one; the message before it has been handled.

        Raises:
            Exception: the trial ended with it.
        """
        self._handled.set()
        message, self._handled = self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message


class ChannelReporter(Reporter):
    """The `report` of a trial that shares its process."""

    def __init__(self, attempt: AttemptConfig, channel: Channel) -> None:
        super().__init__(attempt)
        self._channel = channel

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Return whether to stop, and whether the measurement is due."""
        stop, due = super().decide(measurement)
        return stop or self._channel.is_abandoned, due

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on to the proxy, and wait until the driver has handled it."""
        message = unpack_message(result)
        assert message is not None
        self._channel.send(message)


class PackHost:
    """Places for trials in this process."""

    def __init__(self, name: str, setup: Setup) -> None:
        """Offer the places of `setup`; `name` is that of the process."""
        read_shared_variables()
        # Now, and not with each trial: another one may be starting vLLM, which sets them.
        clear_rendezvous()
        self._placed = TrialPlaced(
            f"{name}-{uuid.uuid4().hex[:8]}", ray.get_runtime_context().get_node_id()
        )
        self._setup = setup
        self._pack: Any = None
        self._lock = threading.Lock()
        """Guards everything below."""
        self._building = threading.Lock()
        """Held while the first trial imports torch: others must not do it at the same time."""
        self._running: dict[int, AttemptConfig] = {}
        self._channels: dict[int, Channel] = {}
        """By number, of trials whose end was not taken yet."""
        self._served = 0
        self._is_broken = False
        """True if an error may have left the process unusable."""
        self._reserved: tuple[int, float] = -1, 0.0
        """Trial that waits to be alone, and until when it counts."""

    def count_trials(self) -> int:
        """Return how many trials the process has at present."""
        return len(self._running)

    def enter(self, attempt: AttemptConfig) -> TrialPlaced | None:
        """Begin an attempt at a trial; return None if it has no place now.

        An earlier attempt at the trial, whose proxy is gone, is told to end first. A process that
        has grown too large or is broken takes no trial, and restarts once it is empty.
        """
        number = attempt.number
        with self._lock:
            if number in self._running:
                self._channels[number].is_abandoned = True
                return None
            if self._is_used_up():
                if not self._running:
                    os._exit(1)  # Ray starts it again
                return None
            if not self._has_place(attempt):
                return None
            self._served += 1
            self._running[number], self._channels[number] = attempt, Channel()
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"trial-{number}")
        future = thread.submit(self._run, attempt, self._channels[number])
        future.add_done_callback(partial(self._end, number, self._channels[number]))
        thread.shutdown(wait=False)
        return self._placed

    def _is_used_up(self) -> bool:
        """Return whether the process should restart before it takes another trial."""
        if not self._served:
            return False
        limit = _import_trainable().compute_memory_limit(self._setup.cpus, self._setup.gpus)
        return self._is_broken or psutil.Process().memory_info().rss > limit

    def _has_place(self, attempt: AttemptConfig) -> bool:
        """Return whether a trial may begin; reserve the process for one that has to be alone."""
        number, now = attempt.number, time.monotonic()
        waits, until = self._reserved
        if waits != number and now < until:
            return False
        if attempt.alone and self._running:
            self._reserved = number, now + RESERVED_SECONDS
            return False
        if any(other.alone for other in self._running.values()):
            return False
        if waits == number:
            self._reserved = -1, 0.0
        return len(self._running) < self._setup.pack

    def exchange(self, number: int) -> TrialMessage:
        """Return the next message of a trial; the driver has handled the one before it.

        Raises:
            AttemptError: the process has restarted, and the trial was lost.
            Exception: the trial ended with it.
        """
        channel = self._channels.get(number)
        if channel is None:
            raise AttemptError("host", HOST_DIED)  # since it has restarted
        is_last = True
        try:
            message = channel.take()
            is_last = isinstance(message, TrialResult)
            return message
        finally:
            if is_last and self._channels.get(number) is channel:
                del self._channels[number]

    def leave(self, number: int) -> None:
        """Tell a trial to end at its next report: its proxy is gone, and nobody resumes it."""
        channel = self._channels.get(number)
        if channel is not None:
            channel.is_abandoned = True

    def close(self) -> None:
        """Free what the trials shared; none runs any more."""
        if self._pack is not None:
            self._pack.close()

    def _run(self, attempt: AttemptConfig, channel: Channel) -> TrialResult:
        """Run an attempt to its end, in a thread of its own."""
        with self._building:
            trainable = _import_trainable()
        reporter = partial(ChannelReporter, attempt, channel)
        return trainable.guard_directory(
            attempt, lambda: trainable.train_where_stored(attempt, reporter, self._train)
        )

    def _train(self, trial: TrialConfig, **options: Any) -> Outcome:
        """Train a trial beside the others; the first one builds what they share."""
        with self._building:
            if self._pack is None:
                self._pack = registry.load(self._setup.train)(self._setup.pack)
        return self._pack.train(trial, **options)

    def _end(self, number: int, channel: Channel, trained: Future[TrialResult]) -> None:
        """Free the place of a trial, and pass on its end."""
        error = trained.exception()
        with self._lock:
            del self._running[number]
            self._is_broken |= _needs_new_process(error)
            if error is not None and _breaks_gpu(error) and self._running:
                self._end_process(error)
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(f"the trial left with {error!r}")  # it would end this process
        channel.end(error or trained.result())

    def _end_process(self, error: BaseException) -> None:
        """End the process after an error with which no trial here can compute any more.

        Nothing tells whose fault it is, so all of them hear the same.
        """
        traceback.print_exception(error)
        loss = AttemptError("host", f"its process ended: {type(error).__name__}: {error}")
        loss.__cause__ = error
        for channel in self._channels.values():
            channel.end(loss)
            channel.is_abandoned = True
        threading.Timer(FAREWELL_SECONDS, os._exit, (1,)).start()


def _needs_new_process(error: BaseException | None) -> bool:
    """Return whether an error of one trial may have left the process unusable for all."""
    if isinstance(error, AttemptError):
        return error.cause == "changed"
    return isinstance(error, EngineDiedError) or _breaks_gpu(error)


def _breaks_gpu(error: BaseException | None) -> bool:
    """Return whether a process can no longer use its GPU after this error."""
    return "CUDA error" in str(error) and not isinstance(error, AttemptError)


def _import_trainable() -> Any:
    from gdpo_tune.tuning.ray import trainable

    return trainable
