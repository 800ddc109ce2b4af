"""Requests that trials stop, and the end of a sweep by Ctrl-C or by the loss of its cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune import Stopper

STOP = "stop"
"""File in the sweep's directory that asks all trials to stop."""
HALT = "halt"
"""File in a trial's directory that asks it alone to stop."""
GRACE = 30.0
"""Seconds that trials get to reach their next report; then Ray ends them."""


class StopFlag:
    """Requests of the driver that trials stop, as files of the directory that every node sees."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def request(self, trial: int | None = None) -> None:
        """Ask one trial, or all, to stop at the next report."""
        path = self._path(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def withdraw(self, trial: int) -> None:
        """Take back the request to one trial."""
        self._path(trial).unlink(missing_ok=True)

    def clear(self) -> None:
        """Take back all requests, of an earlier run too."""
        for path in [self._path(), *self._directory.glob(f"trials/*/{HALT}")]:
            path.unlink(missing_ok=True)

    def is_set(self, trial: int, *, now: bool = False) -> bool:
        """Return whether a trial is asked to stop; `now`: by what the driver has said last."""
        return self._path().exists() or self._path(trial).exists()

    def _path(self, trial: int | None = None) -> Path:
        if trial is None:
            return self._directory / STOP
        return self._directory / "trials" / str(trial) / HALT


def open_stop_flag(directory: Path, address: str) -> StopFlag:
    """Return the requests of a sweep in a directory, or at the address of an object store."""
    if not address:
        return StopFlag(directory)
    from gdpo_tune.tuning.ray.remote import RemoteStopFlag  # only now: fsspec takes a moment

    return RemoteStopFlag(address)


class ClusterLost(BaseException):
    """Ray cannot place anything any more.

    No Exception: after one of those Ray Tune stops every trial, and waits for the answers.
    """


class Interruption(Stopper):
    """The end of a sweep that is interrupted: every trial stops where it can continue later.

    It is also the end of one whose cluster is lost, for whose answers Ray Tune would wait for ever.
    """

    def __init__(self, stop_flag: StopFlag, is_cluster_alive: Callable[[], bool]) -> None:
        self.requested = False
        self._stop_flag = stop_flag
        self._is_cluster_alive = is_cluster_alive
        self._deadline = float("inf")

    def __getstate__(self) -> dict[str, Any]:
        """Return no state, for the copy that Ray writes and nothing reads: flags have threads."""
        return {}

    def request(self) -> None:
        """Ask for the end of the sweep; safe in a signal handler."""
        self.requested = True

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: the scheduler stops single trials."""
        return False

    def stop_all(self) -> bool:
        """Return whether Ray is to end all trials that run; it asks several times a second.

        Raises:
            ClusterLost: Ray is no longer there.
        """
        if not self._is_cluster_alive():
            raise ClusterLost
        if self.requested and self._deadline == float("inf"):
            self._deadline = time.monotonic() + GRACE
            self._stop_flag.request()
        return time.monotonic() > self._deadline
