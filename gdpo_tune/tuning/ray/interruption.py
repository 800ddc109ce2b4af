"""What ends a sweep before its time: Ctrl-C, or the loss of the cluster that it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune import Stopper

GRACE = 30.0
"""Seconds that trials get to reach their next report; then Ray ends them."""


class ClusterLost(BaseException):
    """Ray cannot place anything any more.

    No Exception: at one of those Ray Tune takes leave of every trial, and waits for the answers.
    """


class Interruption(Stopper):
    """Whether and since when the sweep is to stop, for Ray and, through a file, for the trials.

    Ctrl-C asks every trial to stop where it can go on from.

    Args:
        stop_file: what trials look for.
        cluster_alive: whether Ray's servers are there; without them Ray Tune waits for ever.
        grace: seconds that trials get.
    """

    def __init__(
        self, stop_file: Path, cluster_alive: Callable[[], bool], grace: float = GRACE
    ) -> None:
        self.requested = False
        self._file = stop_file
        self._cluster_alive = cluster_alive
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
        """Whether Ray is to end what still runs; it asks several times a second.

        Raises:
            ClusterLost: Ray is no longer there.
        """
        if not self._cluster_alive():
            raise ClusterLost
        return time.monotonic() > self._deadline
