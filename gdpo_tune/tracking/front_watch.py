"""The front, computed now and then beside the driver, which waits for it only at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.tracking.run_content import Content

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_projection import FrontContent

SECONDS = 2.0
"""Least time between two computations."""
SHARE = 0.01
"""Most of the time that they may take: so seldom does an event meet one, and waits for Python."""


class FrontWatch:
    """Tells what of the front has moved. All methods are called from the driver's thread."""

    def __init__(self, spec: SweepSpec) -> None:
        # Not at the top: `check_server` runs before anything is known to be right, and numpy costs.
        from gdpo_tune.tracking import front_projection

        self._project = front_projection.project_front
        self._spec = spec
        self._worker = ThreadPoolExecutor(1, "front")
        self._job: Future[FrontContent] | None = None
        self._told: dict[int, Content] = {}
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether it may be computed again."""
        return self._job is None and time.monotonic() >= self._due

    def begin(self, records: Sequence[TrialRecord]) -> None:
        """Compute the front of these records, all that there are, by number."""
        self._job = self._worker.submit(self._moved, records)

    def take(self, *, wait: bool = False) -> FrontContent | None:
        """What was computed, once: its `trials` are those that moved. None if nothing is ready."""
        if self._job is None or not (wait or self._job.done()):
            return None
        job, self._job = self._job, None
        return job.result()

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def _moved(self, records: Sequence[TrialRecord]) -> FrontContent:
        """In the worker: to compare a thousand trials would take the driver milliseconds."""
        started = time.monotonic()
        front = self._project(self._spec, records)
        moved = {n: content for n, content in front.trials.items() if self._told.get(n) != content}
        self._told = front.trials
        self._due = started + max(SECONDS, (time.monotonic() - started) / SHARE)
        return replace(front, trials=moved)
