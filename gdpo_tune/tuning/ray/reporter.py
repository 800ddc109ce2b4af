"""Which measurements of a trial reach the driver, and how the trial hears that it has to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune

from gdpo_tune.core.trial_files import is_kept
from gdpo_tune.core.trials import Measurement
from gdpo_tune.tuning.ray.messages import AttemptConfig, AttemptError, Setup, TrialUpdate, pack
from gdpo_tune.tuning.ray.stopping import open_stop_flag

SECONDS = 1.0
"""Time after which the next measurement reaches the driver, kept or not: a person is watching."""
RESULTS_A_SECOND = 200
"""Limit over all trials, for results on which nothing is decided: Ray Tune's loop alone takes about
a millisecond of CPU for one result while a thousand trials run, see docs/scale.md."""


def choose_interval(slots: int) -> float:
    """Return the seconds between results of each of so many trials that the driver can handle."""
    return slots / RESULTS_A_SECOND if slots > RESULTS_A_SECOND else 0.0


def has_directory(setup: Setup) -> bool:
    """Return whether this process can write to the sweep's directory, if the sweep has one.

    A lost mount leaves an empty directory, in which a trial could continue although its files would
    never be seen again. So the directory counts only while the sweep's spec is in it.
    """
    try:
        return bool(setup.address) or (
            setup.spec_file.exists() and os.access(setup.spec_file.parent, os.W_OK)
        )
    except OSError:  # of a mount whose server is gone
        return False


class Reporter:
    """The `report` of one trial: thins what goes to the driver, and stops on request.

    Where many trials run, measurements on which nothing is decided go with the next result. So
    curves keep all of their points, and the driver has fewer results to deal with.

    Ray lets a trial continue after a result only once the driver has handled it. So a decision
    about a rung arrives here before the next step; several processes get it a step later.
    """

    def __init__(self, attempt: AttemptConfig) -> None:
        trial, self._setup = attempt.trial, attempt.setup
        self.stopped = False
        """True if it has ended the trial."""
        self.upload: Callable[[], None] | None = None
        """Called with each new checkpoint, before the driver hears of it."""
        self._number = attempt.number
        self._last = trial.training.steps
        self._ends_at = attempt.ends_at
        self._stop_flag = open_stop_flag(self._setup.spec_file.parent, self._setup.address)
        self._sent = float("-inf")
        self._held: list[Measurement] = []
        """To go with the next result."""

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Pass a measurement on if it is due.

        Raises:
            SystemExit: the sweep was interrupted, the scheduler stopped the trial, or it was to end
                at this step; callers free their resources in `finally`.
            AttemptError: the directory is away; what the trial has just written is lost.
        """
        if not has_directory(self._setup):
            raise AttemptError("directory", f"{self._setup.spec_file.parent} is away")
        if checkpoint is not None and self.upload is not None:
            self.upload()
        stop, due = self.decide(measurement)
        if not due:
            self.store_pending(measurement)
        elif not stop:
            self.send(pack(self.build_update(measurement)))
            ends = measurement.step in self._ends_at
            stop = ends or (measurement.has_validation and self.is_halted())
        if stop:
            self.stopped = True
            raise SystemExit

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Return whether to stop, and whether the measurement is due."""
        now, kept = self.read_clock(), is_kept(measurement.step, self._last)
        pause = self._setup.interval if kept else max(self._setup.interval, SECONDS)
        due = measurement.has_validation or now - self._sent >= pause
        if due:
            self._sent = now
        return self._stop_flag.is_set(self._number), due

    def read_clock(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    def store_pending(self, measurement: Measurement) -> None:
        """Keep a measurement for the next result, if its step is one that is passed on."""
        if is_kept(measurement.step, self._last):
            self._held.append(measurement)

    def build_update(self, measurement: Measurement) -> TrialUpdate:
        """Return a measurement with those before it that were held back."""
        earlier, self._held = tuple(self._held), []
        return TrialUpdate(measurement, earlier)

    def is_halted(self) -> bool:
        """Return whether the driver has decided against the trial because of the last result."""
        return self._stop_flag.is_set(self._number, now=True)

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on to the driver."""
        tune.report(result)
