"""Deadlines for the progress of a process: one that hangs ends, and its trials are tried again.

A kernel, a collective or an engine that never returns would hold a GPU until somebody looks. The
stacks of all threads go to standard error and into the directories of the trials. Trials that share
a process share its deadlines: what any of them does is progress.
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
from contextlib import contextmanager, suppress
from pathlib import Path

from gdpo_tune.training.distributed import PATIENCE

MEDIANS = 20
"""Multiple of the median time of a step after which a process counts as hung."""
STACKS = "stacks.txt"
"""File in a trial's directory with the stacks of a process that hung."""
_KEPT = 100  # latest intervals, of which the median is taken
_directories: list[Path] = []
"""Of the trials of this process."""


class Deadline:
    """Deadline for what repeats, such as an optimizer step, while a block expects it."""

    def __init__(
        self, subject: str, floor: float, end: Callable[[str], None] | None = None
    ) -> None:
        """`floor` is the shortest deadline, in seconds; `end` gets the reason once one is over."""
        self._subject, self._floor, self._end = subject, floor, end or end_process
        self._mutex = threading.Lock()
        self._active = 0
        self._last = self._last_step = time.monotonic()
        self._intervals: deque[float] = deque(maxlen=_KEPT)
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self) -> Generator[None]:
        """End the process if nothing proceeds for too long in this block."""
        with self._mutex:
            self._active += 1
            self._last = self._last_step = time.monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._poll, name="deadline", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._mutex:
                self._active -= 1

    @contextmanager
    def pause(self) -> Generator[None]:
        """Stop counting in a block that waits for something outside of this process."""
        with self._mutex:
            self._active -= 1
        try:
            yield
        finally:
            with self._mutex:
                self._active += 1
                self._last = self._last_step = time.monotonic()

    def note_progress(self) -> None:
        """Note that a part of a step was done."""
        self._last = time.monotonic()

    def note_step(self) -> None:
        """Note that a step was done, whose time counts for the median."""
        now = time.monotonic()
        self._intervals.append(now - self._last_step)
        self._last = self._last_step = now

    def get_limit(self) -> float:
        """Return the seconds without progress after which the process ends."""
        steps = list(self._intervals)
        return max(self._floor, MEDIANS * statistics.median(steps)) if steps else self._floor

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
                self._end(
                    f"no {self._subject} for {silent:.0f} s, and the limit is {limit:.0f} s: the "
                    "process hangs and ends"
                )
                return


@contextmanager
def watch_trial(directory: Path) -> Generator[None]:
    """Watch the optimizer steps of a trial, whose directory gets the stacks if it hangs."""
    _directories.append(directory)
    try:
        with TRAINING.watch():
            yield
    finally:
        _directories.remove(directory)


def end_process(reason: str) -> None:
    """Write the stacks of all threads, and end this process."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    with suppress(Exception):  # such as a notebook's, which has no descriptor
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    for directory in _directories:
        with suppress(OSError), (directory / STACKS).open("w") as file:
            file.write(f"{reason}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    os._exit(1)


ENGINE = Deadline("step of the engine", 1_200)
"""Of vLLM in this process, which does a step for each token of a batch."""
TRAINING = Deadline("progress of the training", 1.5 * PATIENCE)
"""Of optimizer steps, and of tokens and micro-batches in them; processes of a trial may have waited
for each other as long as they are allowed to."""
