"""One thread that delivers a spool, batch by batch, for as long as the other side needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from gdpo_tune.core.events import TrackingState
from gdpo_tune.tracking.run_content import is_apart
from gdpo_tune.tracking.spool import BATCH_BYTES, Message, Spool

INTERVAL = 5.0
"""Seconds between two batches: many small updates of a trial become one request."""
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
CLOSING_DELAY = 0.5
"""Pause between attempts, in seconds, while somebody waits for the process to end."""

UNPLACED = "files or models found no place, all else is there"
BROKEN = "the sending thread broke, as its traceback says"


class Away(Exception):
    """The receiver cannot take anything now; the same may succeed later."""


class Refused(Exception):
    """The receiver understood and said no; the same will be refused again."""


class Receiver(Protocol):
    """Where messages go. Its methods are called from the sending thread alone."""

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        """Take the messages and return those that could not be placed for now.

        Only messages that nothing else waits for may be returned (files). A repetition of what
        was delivered before must change nothing. The first call may hold no messages; it is the
        occasion to restore what was delivered by earlier processes and is no longer there.

        Raises:
            Away: try all of them again later.
            Refused: at least one of them will never be taken.
        """
        ...

    def forget(self) -> None:
        """Drop what is remembered of the other side, after a failure."""
        ...

    def settle(self) -> None:
        """Mend what failed deliveries may have left, once everything is delivered.

        Raises:
            Away: try again later.
        """
        ...


class Sender:
    """Delivers `spool` to `receiver` in a daemon thread, with growing pauses while it fails.

    Args:
        interval: seconds between two batches.
    """

    def __init__(self, spool: Spool, receiver: Receiver, interval: float = INTERVAL) -> None:
        self._spool = spool
        self._receiver = receiver
        self._interval = interval
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._refusals = 0
        self._met = False
        self._behind = False
        self._settled = False
        self.problem = ""
        """Why the last attempt failed; empty if it did not."""
        self.refused = 0
        """How many messages the receiver refused for good."""
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def state(self) -> TrackingState:
        """How far the other side is, now; costs next to nothing."""
        problem, pending = self.problem or self._broken(), self._spool.pending()
        if problem:
            return TrackingState("away", pending, problem)
        if self._spool.leftover:
            return TrackingState("away", pending, UNPLACED)
        return TrackingState("catching up" if self._behind else "up to date", pending, "")

    def close(self, timeout: float) -> int:
        """Deliver what is left for at most `timeout` seconds; return how much is left then."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout)
        self.problem = self.problem or self._broken()
        return self._spool.pending()

    def _broken(self) -> str:
        """Why the thread has ended although messages are left; empty if it has not."""
        ended = self._thread.ident is not None and not self._thread.is_alive()
        in_time = time.monotonic() <= self._deadline
        return BROKEN if ended and in_time and not self._spool.is_drained() else ""

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not (self._closing.is_set() and self._spool.is_drained() and self._is_done()):
            try:
                more = self._step()
            except (Away, Refused) as error:
                self.problem = str(error)
                self._behind = True
                self._receiver.forget()
                self._pause(delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                self.problem = ""
                self._behind = more or (self._behind and not self._spool.is_drained())
                delay = FIRST_DELAY
                self._pause(0 if more else self._interval)
            if time.monotonic() > self._deadline:
                return

    def _is_done(self) -> bool:
        """Whether an empty spool has been delivered and settled at least, or tried to."""
        return (self._met and self._settled) or bool(self.problem)

    def _pause(self, seconds: float) -> None:
        if not self._closing.wait(seconds):
            return
        if self.problem or self._spool.leftover:
            time.sleep(CLOSING_DELAY)

    def _step(self) -> bool:
        """Deliver one batch; return whether it was a full one, so that more may wait."""
        messages, offset = self._spool.batch()
        more = offset - self._spool.offset >= BATCH_BYTES
        # What could not be placed would fail again in every batch and slow down the others.
        retry = self._closing.is_set() or any(is_apart(message) for message in messages)
        waiting = [] if retry else self._spool.leftover
        left = self._deliver([*self._spool.leftover, *messages] if retry else messages)
        self._spool.commit(offset, [*waiting, *left])
        if self._closing.is_set() and self._spool.is_drained():
            self._receiver.settle()
            self._settled = True
        return more

    def _deliver(self, messages: list[Message]) -> list[Message]:
        """Deliver `messages`; what is refused twice in a row is set aside.

        The first refusal may be due to a stale memory of the other side, which `forget` clears.
        """
        # The first delivery is made even of nothing: the receiver mends what the other side lost.
        if not messages and self._met:
            return []
        try:
            left = self._receiver.deliver(messages)
        except Refused:
            self._refusals += 1
            if self._refusals < 2:
                raise
            left = self._deliver_singly(messages)
        self._refusals = 0
        self._met = True
        return left

    def _deliver_singly(self, messages: list[Message]) -> list[Message]:
        left: list[Message] = []
        for message in messages:
            try:
                left += self._receiver.deliver([message])
            except Refused as error:
                self._spool.set_aside(message, str(error))
                self.refused += 1
        return left
