"""The head of a cluster that was joined, asked now and then from a thread of its own.

A call that Ray has under way when the head goes away does not return, and after a minute Ray ends
the process in no order and without a word of ours. So somebody else has to notice, and to tell.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

ASK_SECONDS = 2.0
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""Without an answer, after which the head is lost."""
LEAVE_SECONDS = 15.0
"""That the process then has to end in order; together with the others less than Ray's minute."""
LOST = (
    "a server of Ray is gone (killed, out of memory, or crashed), and no trial can run "
    "without it; what trials have recorded is kept"
)


class HeadWatch:
    """Whether the head is there, as of the last answer."""

    def __init__(
        self,
        answers: Callable[[], bool],
        leave: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            answers: asks the head; returns within seconds.
            leave: ends the process.
            clock: seconds.
        """
        self._answers = answers
        self._leave = leave
        self._clock = clock
        self._heard = clock()

    def ask(self) -> None:
        """Ask once; leave if nobody else did although the head is lost."""
        if self._answers():
            self._heard = self._clock()
        elif self.silence() > SILENT_SECONDS + LEAVE_SECONDS:
            self._leave()

    def silence(self) -> float:
        """Seconds since the last answer."""
        return self._clock() - self._heard

    def is_silent(self) -> bool:
        """Whether a question of Ray's might wait for an answer."""
        return self.silence() > ASK_SECONDS + 2 * CONNECT_SECONDS

    def is_lost(self) -> bool:
        """Whether to give it up."""
        return self.silence() > SILENT_SECONDS


@contextmanager
def watched(address: str) -> Generator[HeadWatch]:
    """Watch the head at `HOST:PORT`."""
    watch = HeadWatch(lambda: listens(address), leave)
    ended = threading.Event()

    def ask_again_and_again() -> None:
        while not ended.wait(ASK_SECONDS):
            watch.ask()

    thread = threading.Thread(target=ask_again_and_again, name="head", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def listens(address: str) -> bool:
    """Whether anybody does at `HOST:PORT`."""
    try:
        connect(address, CONNECT_SECONDS)
    except OSError:
        return False
    return True


def connect(address: str, seconds: float) -> None:
    """Find out whether anybody listens at `HOST:PORT`.

    Raises:
        OSError: nobody does, or not within so many seconds.
        UnicodeError: no host can be called that.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), seconds).close()


def leave() -> None:
    """End this process, whose main thread waits for Ray."""
    print(f"error: {LOST}, and the same command goes on.", file=sys.stderr, flush=True)
    os._exit(1)
