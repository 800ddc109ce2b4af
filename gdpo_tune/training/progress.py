"""Deadlines for the progress of a process: one that hangs ends, and its trial is tried again.

A kernel, a collective or an engine that never returns would hold a GPU until somebody looks.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress

from gdpo_tune.training.distributed import PATIENCE

MEDIANS = 20
"""Multiple of the median time of a step after which a process counts as hung."""
_KEPT = 100  # latest steps, of which the median is taken


class Deadline:
    """Deadline for what repeats, such as an optimizer step, while a block expects it."""

    def __init__(
        self, subject: str, floor: float, end: Callable[[str], None] | None = None
    ) -> None:
        """`floor` is the shortest deadline, in seconds; `end` gets the reason once one is over."""
        self._subject, self._floor, self._end = subject, floor, end or end_process
        self._active = 0
        self._mutex = threading.Lock()
        self._last = self._last_step = time.monotonic()
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._thread: threading.Thread | None = None

    def watch(self) -> AbstractContextManager[None]:
        """Return a block in which the process ends if nothing proceeds for too long."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="deadline", daemon=True)
            self._thread.start()
        return self._change(1)

    def pause(self) -> AbstractContextManager[None]:
        """Return a part of such a block that waits for something outside of this process."""
        return self._change(-1)

    def note_progress(self, *, step: bool = False) -> None:
        """Note that a part of a step was done, or all of it: its time counts for the median."""
        self._last = time.monotonic()
        if step:
            self._steps.append(self._last - self._last_step)
            self._last_step = self._last

    def get_limit(self) -> float:
        """Return the seconds without progress after which the process ends."""
        steps = list(self._steps)
        return max(self._floor, MEDIANS * statistics.median(steps)) if steps else self._floor

    @contextmanager
    def _change(self, count: int) -> Generator[None]:
        def add(count: int) -> None:
            with self._mutex:
                self._active += count
                self._last = self._last_step = time.monotonic()

        add(count)
        try:
            yield
        finally:
            add(-count)

    def _poll(self) -> None:
        pause, silent, before = self._floor / 60, 0.0, time.monotonic()
        while True:
            time.sleep(pause)
            now, limit = time.monotonic(), self.get_limit()
            with self._mutex:
                # This process may have been stopped meanwhile.
                silent = min(silent + min(now - before, 2 * pause), now - self._last)
                silent = silent if self._active else 0.0
            before = now
            if silent > limit:
                self._end(f"no {self._subject} for {silent:.0f} s; the limit is {limit:.0f} s")
                return


def end_process(reason: str) -> None:
    """Write the stacks of all threads to standard error, and end this process."""
    print(f"error: this process hangs: {reason}", file=sys.stderr, flush=True)
    with suppress(Exception):  # such as a notebook's, which has no descriptor
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(1)


ENGINE = Deadline("step of the engine", 1_200)
"""Of vLLM in this process, which does a step for each token of a batch."""
TRAINING = Deadline("progress of the training", 1.5 * PATIENCE)
"""Of optimizer steps, and of tokens and micro-batches in them; processes of a trial may have waited
for each other as long as they are allowed to."""
