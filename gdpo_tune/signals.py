"""The first Ctrl-C asks, the second one ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


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
