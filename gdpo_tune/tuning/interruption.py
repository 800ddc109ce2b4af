"""Ctrl-C: the first asks every trial to stop where it can go on from, the second ends all now."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ray.tune import Stopper

GRACE = 30.0
"""Seconds that trials get to reach their next report; then Ray ends them."""


class Interruption(Stopper):
    """Whether and since when the sweep is to stop, for Ray and, through a file, for the trials."""

    def __init__(self, stop_file: Path, grace: float = GRACE) -> None:
        self.requested = False
        self._file = stop_file
        self._grace = grace
        self._deadline = float("inf")

    def request(self) -> None:
        """Ask for the end of the sweep."""
        self.requested = True
        self._deadline = time.monotonic() + self._grace
        self._file.touch()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether this one trial is to end: that is the scheduler's business."""
        return False

    def stop_all(self) -> bool:
        """Whether Ray is to end what still runs."""
        return time.monotonic() > self._deadline


@contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; a second one raises KeyboardInterrupt.

    Outside of the main thread, where Python takes no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if received.is_set():
            raise KeyboardInterrupt
        received.set()
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
