"""Ctrl-C: the first asks every trial to stop where it can go on from."""

from __future__ import annotations

import time
from pathlib import Path
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
