"""A sweep while it runs: its state from events, its pace, and values that are kept recent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core import events
from gdpo_tune.core.trials import Measurement, Objective, TrialRecord

T = TypeVar("T")
ENDED = ("complete", "pruned", "failed")
"""States of a trial in which nothing more follows."""
EVALUATION = 0.1
"""Time of a trial that trains nothing, as a share of a training's: the unit of work."""


class Paced(Generic[T]):
    """A value that takes at most one part in `share` of the time to keep recent."""

    def __init__(
        self, share: float, least: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make it again `least` seconds after the last time at the earliest."""
        self.value: T | None = None
        self._share, self._least, self._clock = share, least, clock
        self._due = -float("inf")

    @property
    def is_due(self) -> bool:
        """True if it may be computed again."""
        return self._clock() >= self._due

    def expire(self) -> None:
        """Let it be made again at once."""
        self._due = -float("inf")

    def make(self, compute: Callable[[], T]) -> T:
        """Compute it, and set when it is due again."""
        started = self._clock()
        self.value = compute()
        now = self._clock()
        self._due = now + max(self._least, self._share * (now - started))
        return self.value


class Running(NamedTuple):
    """A running trial and its latest measurements."""

    record: TrialRecord
    latest: Measurement | None
    validated: Measurement | None
    """The latest measurement with an evaluation."""


class LiveState:
    """Counts, running trials, front and time left, kept by events. Safe to read from a thread."""

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
        self.pause: events.RecordedRequest | None = None
        """The request that paused the sweep; None if it is not paused."""
        self.ending = ""
        """How the sweep ended, in a few words; empty until it has."""
        self._clock = clock
        self._lock = Lock()
        self._records: dict[int, TrialRecord] = {}
        self._latest: dict[int, Measurement] = {}
        self._validated: dict[int, Measurement] = {}
        self._started_any = False
        self._planned_work = self._done_before = self._paused_at = 0.0
        self._began = clock()
        """Start of this session, later by the time that it was paused."""
        self._front = Paced[Front](share=20, least=1.0, clock=clock)

    def apply(self, event: events.Event) -> None:
        """Apply one event; costs next to nothing."""
        with self._lock:
            if isinstance(event, events.SweepStarted | events.SweepFinished):
                self._records = {record.number: record for record in event.records}
            if isinstance(event, events.SweepStarted | events.SweepSteered):
                self.planned = event.planned
                self._planned_work = measure_planned_work(event.planned, event.candidates)
                if self.pause is None:
                    self._paused_at = self._clock()
                elif event.pause is None:
                    self._began += self._clock() - self._paused_at
                self.pause = event.pause
            match event:
                case events.SweepStarted():
                    self._began = self._clock()
                    self._done_before = self._measure_work()
                case events.SweepFinished():
                    self._front.expire()
                    why = f" ({event.reason})" if event.reason else ""
                    already = f"was finished already{why}: nothing was started"
                    self.ending = f"finished{why}" if self._started_any else already
                    self.ending = "interrupted" if event.interrupted else self.ending
                case events.TrialProgress():
                    self._latest[event.number] = event.measurement
                    if event.measurement.has_validation:
                        self._validated[event.number] = event.measurement
                case events.SearchStarted() | events.IncidentOccurred() | events.SweepSteered():
                    pass
                case _:
                    number = event.record.number
                    self._records[number] = event.record
                    if isinstance(event, events.TrialStarted):
                        self._started_any = True
                    else:
                        self._latest.pop(number, None)
                        self._validated.pop(number, None)

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
        return self.compute_front() or self._front.value or build_front((), self.objectives)

    def compute_front(self) -> Front | None:
        """Return the front of this moment; None if the last one is still recent enough."""
        if not self._front.is_due:
            return None
        with self._lock:
            records = list(self._records.values())
        return self._front.make(lambda: build_front(records, self.objectives))

    def estimate_seconds_left(self) -> float | None:
        """Return the time left at the pace so far; None while that is unknown, as in a pause."""
        if self.pause is not None:
            return None
        with self._lock:
            done = self._measure_work()
        seconds = self._clock() - self._began
        return estimate_seconds_left(self._planned_work, done, self._done_before, seconds)

    def _measure_work(self) -> float:
        latest = {number: measurement.step for number, measurement in self._latest.items()}
        return measure_work_done(self._records.values(), latest, self.steps)


def measure_planned_work(planned: int, candidates: int) -> float:
    """Return the work of so many trials, `candidates` of which train nothing."""
    return planned - (1 - EVALUATION) * candidates


def measure_work_done(
    records: Iterable[TrialRecord], latest_steps: Mapping[int, int], steps: int
) -> float:
    """Return the work of the trials that ended, and the shares of the running ones.

    `latest_steps` holds the last step of each running trial, by number, of `steps` in all.
    """
    ended = sum(EVALUATION if record.parts else 1.0 for record in records if not record.is_open)
    return ended + sum(min(step / steps, 1.0) for step in latest_steps.values())


def estimate_seconds_left(
    planned_work: float, done: float, done_before: float, seconds: float
) -> float | None:
    """Return the time left; None while too little is done.

    In the last `seconds` the work done grew from `done_before` to `done`.
    """
    gained = done - done_before
    left = max(0.0, planned_work - done)
    return None if gained < 0.1 else left * seconds / gained  # too little work for an estimate
