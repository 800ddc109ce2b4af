"""One thread that delivers a spool, batch by batch, for as long as the server needs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from gdpo_tune.core.events import TrackingState
from gdpo_tune.tracking.spool import (
    BATCH_BYTES,
    Message,
    MessageRefused,
    ServerUnavailable,
    Spool,
    is_separate,
)

if TYPE_CHECKING:
    from gdpo_tune.tracking.mlflow_writer import MlflowWriter

INTERVAL = 5.0
"""Seconds between two batches: many small updates of a trial become one request."""
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
CLOSING_DELAY = 0.5
"""Seconds between attempts while the process waits to end."""
LEFTOVER = "some files or registered models could not be stored, everything else is there"
CRASHED = "the sending thread crashed, see its traceback"


class Sender:
    """Delivers `spool` through `writer` in a daemon thread; pauses grow while delivery fails."""

    def __init__(self, spool: Spool, writer: MlflowWriter, interval: float = INTERVAL) -> None:
        self._spool = spool
        self._writer = writer
        self._interval = interval
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._refusals = 0
        """Refused batches in a row."""
        self._connected = False
        self._catching_up = False
        self._complete = False
        """True once everything is delivered and duplicates are deleted."""
        self.problem = ""
        """Why the last attempt failed; empty if it did not."""
        self.refused = 0
        """Number of messages that the server refused for good."""
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def get_state(self) -> TrackingState:
        """Return how far delivery is, without disk access."""
        pending = self._spool.count_pending()
        problem = self.problem or self._find_crash() or (LEFTOVER if self._spool.leftover else "")
        if problem:
            return TrackingState("away", pending, problem)
        return TrackingState("catching up" if self._catching_up else "up to date", pending, "")

    def close(self, timeout: float) -> int:
        """Deliver for at most `timeout` seconds more and return how many messages are left."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout)
        self.problem = self.problem or self._find_crash()
        return self._spool.count_pending()

    def _find_crash(self) -> str:
        """Return `CRASHED` if the thread ended although messages are left, else nothing."""
        ended = self._thread.ident is not None and not self._thread.is_alive()
        in_time = time.monotonic() <= self._deadline
        return CRASHED if ended and in_time and not self._spool.is_drained() else ""

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._is_done():
            try:
                more = self._send_batch()
            except (ServerUnavailable, MessageRefused) as error:
                self.problem = str(error)
                self._catching_up = True
                self._writer.reset()
                self._pause(delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                self.problem = ""
                self._catching_up = more or (self._catching_up and not self._spool.is_drained())
                delay = FIRST_DELAY
                self._pause(0 if more else self._interval)
            if time.monotonic() > self._deadline:
                return

    def _is_done(self) -> bool:
        """Return whether `close` was called, nothing is left, and a delivery has been tried."""
        tried = self._complete or bool(self.problem)
        return self._closing.is_set() and self._spool.is_drained() and tried

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds) and (self.problem or self._spool.leftover):
            time.sleep(CLOSING_DELAY)

    def _send_batch(self) -> bool:
        """Deliver one batch; return whether it was a full one, so that more may wait."""
        messages, offset = self._spool.read_batch()
        more = offset - self._spool.offset >= BATCH_BYTES
        # Retrying the leftover with every batch would slow down the others.
        retry = self._closing.is_set() or any(is_separate(message) for message in messages)
        waiting = [] if retry else self._spool.leftover
        left = self._deliver([*self._spool.leftover, *messages] if retry else messages)
        self._spool.commit(offset, [*waiting, *left])
        if self._closing.is_set() and self._spool.is_drained():
            self._writer.delete_duplicates()
            self._complete = True
        return more

    def _deliver(self, messages: list[Message]) -> list[Message]:
        """Deliver `messages` and return those that are left; set refused ones aside.

        A batch is refused only the second time in a row: the first refusal may come from stale
        knowledge of the server, which `reset` clears.
        """
        # The first delivery happens even without messages: the writer restores what was lost.
        if not messages and self._connected:
            return []
        try:
            left = self._writer.deliver(messages)
        except MessageRefused:
            self._refusals += 1
            if self._refusals < 2:
                raise
            left = self._deliver_singly(messages)
        self._refusals = 0
        self._connected = True
        return left

    def _deliver_singly(self, messages: list[Message]) -> list[Message]:
        left: list[Message] = []
        for message in messages:
            try:
                left += self._writer.deliver([message])
            except MessageRefused as error:
                self._spool.set_aside(message, str(error))
                self.refused += 1
        return left
