"""State of a running sweep, kept up to date by its events. Safe to read from a thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.events import (
    Event,
    IncidentOccurred,
    RecordedRequest,
    SearchStarted,
    SweepFinished,
    SweepStarted,
    SweepSteered,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.trials import Measurement, Objective, TrialRecord
from gdpo_tune.results.time_left import (
    estimate_seconds_left,
    measure_planned_work,
    measure_work_done,
)

MIN_INTERVAL = 1.0
"""Least seconds between two computations of the front."""
IDLE_SHARE = 20
"""Computing the front may take one part in this many of the time, however large the sweep is."""


@dataclass(frozen=True)
class Running:
    """A running trial and its latest measurements."""

    record: TrialRecord
    latest: Measurement | None
    validated: Measurement | None
    """The latest measurement with an evaluation."""


class Progress:
    """Counts, running trials, the front so far and an estimate of the time left."""

    def __init__(
        self,
        objectives: tuple[Objective, ...],
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objectives = objectives
        self.steps = steps
        """Training steps of a trial."""
        self.planned = 0
        """Trials at the end of the sweep, at most."""
        self.pause: RecordedRequest | None = None
        """The request that paused the sweep; None if it is not paused."""
        self._planned_work = 0.0
        """Their time, in trainings."""
        self.ending = ""
        """How the sweep ended, in a few words; empty until it has."""
        self._clock = clock
        self._lock = Lock()
        self._records: dict[int, TrialRecord] = {}
        self._latest: dict[int, Measurement] = {}
        self._validated: dict[int, Measurement] = {}
        self._started_any = False
        self._began = clock()
        """Start of this session, later by the time that it was paused."""
        self._paused_at = 0.0
        self._done_before = 0.0
        self._front: Front | None = None
        self._front_cost = 0.0
        self._front_at = -float("inf")

    def update(self, event: Event) -> None:
        """Apply one event; costs next to nothing."""
        with self._lock:
            if isinstance(event, SweepStarted | SweepFinished):
                self._records = {record.number: record for record in event.records}
            if isinstance(event, SweepStarted | SweepSteered):
                self.planned = event.planned
                self._set_pause(event.pause)
                self._planned_work = measure_planned_work(event.planned, event.candidates)
            if isinstance(event, SweepStarted):
                self._began = self._clock()
                self._done_before = self._measure_work()
            elif isinstance(event, SweepFinished):
                self._front_at = -float("inf")
                self.ending = self._describe_ending(event)
            elif isinstance(event, TrialProgress):
                self._latest[event.number] = event.measurement
                if event.measurement.has_validation:
                    self._validated[event.number] = event.measurement
            elif not isinstance(event, SearchStarted | IncidentOccurred | SweepSteered):
                self._records[event.record.number] = event.record
                if isinstance(event, TrialStarted):
                    self._started_any = True
                else:
                    self._latest.pop(event.record.number, None)
                    self._validated.pop(event.record.number, None)

    def count_states(self) -> Counter[str]:
        """Return the number of trials in each state."""
        with self._lock:
            return Counter(record.state for record in self._records.values())

    def list_running(self) -> list[Running]:
        """Return the running trials, by number."""
        with self._lock:
            return [
                Running(record, self._latest.get(number), self._validated.get(number))
                for number, record in sorted(self._records.items())
                if record.state == "running"
            ]

    def get_front(self) -> Front:
        """Return the front so far; it may lag behind, see `compute_front`."""
        return self.compute_front() or self._front or build_front((), self.objectives)

    def compute_front(self) -> Front | None:
        """Return the front of this moment; None if the last one is still recent enough."""
        now = self._clock()
        if now < self._front_at + max(MIN_INTERVAL, IDLE_SHARE * self._front_cost):
            return None
        with self._lock:
            records = list(self._records.values())
        self._front = build_front(records, self.objectives)
        self._front_at = self._clock()
        self._front_cost = self._front_at - now
        return self._front

    def estimate_seconds_left(self) -> float | None:
        """Return the time left at the pace so far; None before a tenth of a trial is done.

        None in a pause too: nobody knows how long it lasts.
        """
        if self.pause is not None:
            return None
        with self._lock:
            done = self._measure_work()
        seconds = self._clock() - self._began
        return estimate_seconds_left(self._planned_work, done, self._done_before, seconds)

    def _set_pause(self, pause: RecordedRequest | None) -> None:
        if self.pause is None:
            self._paused_at = self._clock()
        elif pause is None:
            self._began += self._clock() - self._paused_at
        self.pause = pause

    def _describe_ending(self, event: SweepFinished) -> str:
        if event.interrupted:
            return "interrupted"
        why = f" ({event.reason})" if event.reason else ""
        already = f"was finished already{why}: nothing was started"
        return f"finished{why}" if self._started_any else already

    def _measure_work(self) -> float:
        latest = {number: measurement.step for number, measurement in self._latest.items()}
        return measure_work_done(self._records.values(), latest, self.steps)
