"""What sandboxes share whose threads run what they are given."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from ..core.closing import Closing
from ..core.errors import GdpoTuneError, SandboxInfraError


class Threaded(Closing):
    """Knows whether its threads are there to take a batch."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def _is_forked(self) -> bool:
        """Whether this is a copy in a fork, which has none of the threads."""
        return os.getpid() != self._owner

    def _require_threads(self) -> None:
        """Refuse a batch that nobody would run.

        Raises:
            RuntimeError: this is a fork of the process that made this sandbox.
            ValueError: it is closed.
            SandboxInfraError: one of its threads has died.
        """
        if self._is_forked():
            raise RuntimeError(
                f"this sandbox belongs to process {self._owner}: a fork must open its own"
            )
        if self._closing.is_set():
            raise ValueError("this sandbox is closed")
        if not all(thread.is_alive() for thread in self._threads):
            raise SandboxInfraError("a thread of this sandbox has died: open another sandbox")


@contextmanager
def foreseeing() -> Generator[None, None, None]:
    """Turn every error into one of this package's: somebody waits for the thread's answer."""
    try:
        yield
    except GdpoTuneError:
        raise
    except Exception as error:
        raise SandboxInfraError(f"the sandbox has met an error of its own: {error!r}") from error
