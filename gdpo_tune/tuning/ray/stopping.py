"""Requests that trials stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from gdpo_tune.core.object_store import StoreDirectory

STOP = "stop"
"""File in the sweep's directory that asks all trials to stop; in a store, see `RemoteStopFlag`."""
HALT = "halt"
"""File in a trial's directory that asks it alone to stop."""
ALL = "all"  # the request to all trials
ASK_SECONDS = 1.0
"""Seconds between two polls of a trial: one at every short step would be too many."""
ANSWER_SECONDS = 5.0
"""Seconds for which a step waits for the answer, and the driver until a request has arrived."""
REQUEST_PATIENCE = 60.0
"""Seconds for which a request is repeated."""


class StopFlag:
    """Requests of the driver that trials stop, as files of the directory that every node sees."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def request(self, trial: int | None = None) -> None:
        """Ask one trial, or all, to stop at the next report."""
        path = self._get_path(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def withdraw(self, trial: int) -> None:
        """Take back the request to one trial."""
        self._get_path(trial).unlink(missing_ok=True)

    def clear(self) -> None:
        """Take back all requests, of an earlier run too."""
        for path in [self._get_path(), *self._directory.glob(f"trials/*/{HALT}")]:
            path.unlink(missing_ok=True)

    def is_set(self, trial: int, *, now: bool = False) -> bool:
        """Return whether a trial is asked to stop; `now`: by the driver's latest request."""
        return self._get_path().exists() or self._get_path(trial).exists()

    def _get_path(self, trial: int | None = None) -> Path:
        if trial is None:
            return self._directory / STOP
        return self._directory / "trials" / str(trial) / HALT


class RemoteStopFlag(StopFlag):
    """Requests as words of one small file in the sweep's object store: numbers of trials, or `all`.

    A thread talks to the store, so one that does not answer delays neither side for long. A request
    is repeated for a while; a trial that gets no answer continues.
    """

    def __init__(self, address: str) -> None:
        self._files = StoreDirectory(address, patience=REQUEST_PATIENCE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stop-requests")
        self._requests: set[str] = set()
        self._answer: Future[bool] = Future()
        self._answer.set_result(False)
        self._asked = float("-inf")

    def request(self, trial: int | None = None) -> None:
        """See `StopFlag`."""
        self._requests.add(ALL if trial is None else str(trial))
        self._call(self._files.write, STOP, self._encode_content())

    def withdraw(self, trial: int) -> None:
        """See `StopFlag`."""
        self._requests.discard(str(trial))
        self._call(self._files.write, STOP, self._encode_content())

    def clear(self) -> None:
        """See `StopFlag`."""
        self._requests.clear()
        self._files.write(STOP, self._encode_content())

    def is_set(self, trial: int, *, now: bool = False) -> bool:
        """See `StopFlag`; without `now`, the store is polled at intervals."""
        if self._answer.done() and (now or time.monotonic() - self._asked >= ASK_SECONDS):
            self._asked = time.monotonic()
            self._answer = self._call(self._find, ALL, str(trial))
        answer = self._answer
        return answer.done() and answer.exception() is None and answer.result()

    def _encode_content(self) -> bytes:
        return " ".join(sorted(self._requests)).encode()

    def _find(self, *words: str) -> bool:
        return not set(words).isdisjoint((self._files.read(STOP) or b"").decode().split())

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let the thread call a method, and wait for a moment until it is done."""
        call = self._thread.submit(method, *arguments)
        wait([call], ANSWER_SECONDS)
        return call


def open_stop_flag(directory: Path, address: str) -> StopFlag:
    """Return the requests of a sweep in a directory, or at the address of an object store."""
    return RemoteStopFlag(address) if address else StopFlag(directory)
