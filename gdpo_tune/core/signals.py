"""The first Ctrl-C asks, the second one ends. A terminal that was closed asks, however often."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` at the first SIGINT, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt.

    SIGHUP, which tells that the terminal was closed, stays ignored under `nohup`. It is nobody's
    second one: the shell and the kernel each send it. Outside of the main thread, where Python
    takes no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = threading.Event()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed(terminals)
        elif received.is_set():
            raise KeyboardInterrupt
        if not received.is_set():
            received.set()
            stop()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hangups_held() -> Generator[None]:
    """Hold SIGHUP back in this thread until the end, and for good in what is started meanwhile.

    The kernel sends it to everything that belongs to a terminal which is closed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_closed(terminals: Sequence[int]) -> None:
    """Let what is printed from now on go nowhere where the terminal was closed.

    To print there is an error, which would end what is to end in order.

    Args:
        terminals: descriptors that were terminals.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        if not os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
