"""Signals that stop a command in order: the first Ctrl-C asks it to stop, the second aborts it.

A terminal that closes asks too, but never aborts: the shell and the kernel each send SIGHUP.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""


@contextmanager
def stop_on_signals(stop: Callable[[int], None]) -> Generator[None]:
    """Call `stop` at the first SIGINT, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt.

    `stop` gets the exit status of a command that the signal ends, as shells have it: 128 and its
    number. A KeyboardInterrupt that leaves the block has it as its argument.

    A SIGHUP is never the second one. A command that was started with SIGHUP ignored, as by `nohup`,
    keeps ignoring it. Outside of the main thread, where Python receives no signals, this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    statuses = list[int]()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence_closed(terminals)
        elif statuses:
            raise KeyboardInterrupt
        statuses.append(128 + number)
        if len(statuses) == 1:
            stop(statuses[0])

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = tuple(statuses[:1])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def block_hangups() -> Generator[None]:
    """Block SIGHUP in this thread until the end, and for good in processes started meanwhile.

    The kernel sends it to every process of a terminal that is closed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _silence_closed(terminals: Sequence[int]) -> None:
    """Redirect output to /dev/null where its terminal was closed.

    To print to a closed terminal is an error, which would keep a command from ending in order.
    `terminals` are descriptors that were terminals.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        if not os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
