"""Which measurements of a trial reach the driver, and how the trial hears that it is to end."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ray import tune

from gdpo_tune.core.steps import is_kept
from gdpo_tune.core.trials import Measurement, TrialConfig
from gdpo_tune.tuning.ray.folder import Folder

SECONDS = 1.0
"""Time after which the next measurement reaches the driver, kept or not: a person is watching."""
RESULTS_A_SECOND = 200
"""Of all trials together, on which nothing is decided: Ray Tune's loop alone takes about a
millisecond of CPU for one where a thousand trials run, see docs/scale.md."""
HALT = "halt"
"""File in a trial's folder that asks it alone to end."""


def pace_of(slots: int) -> float:
    """Seconds between results of each of so many trials at which the driver keeps up with all."""
    return slots / RESULTS_A_SECOND if slots > RESULTS_A_SECOND else 0.0


class Reporter:
    """The `report` of one trial: thins what goes to the driver, and stops on request.

    Where many trials run, what nobody waits for goes with the next result, so that curves keep all
    of their points and the driver has fewer results to deal with.

    Ray lets a trial go on from a result only once the driver has dealt with it, so what the driver
    decides about a rung is known here before the next step begins. Several processes of one trial
    hear of it a step later.
    """

    def __init__(
        self,
        trial: TrialConfig,
        stop: Path,
        ends_at: Collection[int] = (),
        pace: float = 0.0,
        folder: Folder | None = None,
    ) -> None:
        self.stopped = False
        """Whether it has ended the trial."""
        self._stop = stop
        self.ends_at = ends_at
        """Steps after which it ends the trial whatever the driver says."""
        self._folder = folder
        self._halt = trial.directory / HALT
        self._last = trial.training.steps
        self._pace = pace
        self._sent = float("-inf")
        self._held: list[Measurement] = []
        """To go with the next result."""

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Pass a measurement on if it is due.

        Raises:
            SystemExit: the sweep was interrupted, the scheduler stopped the trial, or it was to end
                at this step; what holds resources lets go in `finally`.
            FolderAwayError: what the trial has just written is nowhere.
        """
        if self._folder is not None:
            self._folder.check()
        stop, due = self.decide(measurement)
        if not due:
            self.hold(measurement)
        elif not stop:
            self.send(self.result(measurement))
            ends = measurement.step in self.ends_at
            stop = ends or (measurement.validated and self.halted())
        if stop:
            self.stopped = True
            raise SystemExit

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Whether to stop, and whether the measurement is due."""
        now, kept = self.now(), is_kept(measurement.step, self._last)
        pause = self._pace if kept else max(self._pace, SECONDS)
        due = measurement.validated or now - self._sent >= pause
        if due:
            self._sent = now
        return self.asked(), due

    def asked(self) -> bool:
        """Whether the driver wants the trial to end."""
        return self._stop.exists() or self._halt.exists()

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def hold(self, measurement: Measurement) -> None:
        """Keep a measurement for the next result, if its step is one that is passed on."""
        if is_kept(measurement.step, self._last):
            self._held.append(measurement)

    def result(self, measurement: Measurement) -> dict[str, Any]:
        """What the driver is told: a measurement, and those before it that were held back."""
        earlier, self._held = tuple(self._held), []
        return {"measurement": measurement, "earlier": earlier}

    def halted(self) -> bool:
        """Whether the driver has decided against the trial since it took the last result."""
        return self.asked()

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on to the driver."""
        tune.report(result)
