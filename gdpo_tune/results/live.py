"""A sweep while it runs: its state from events, its pace, and values that are kept recent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core import events
from gdpo_tune.core.metrics import HOUR
from gdpo_tune.core.trials import Cost, Measurement, Objective, TrialRecord

T = TypeVar("T")
ENDED = ("complete", "pruned", "failed")
"""States of a trial in which nothing more follows."""
LEAST_SHARE = 0.02
"""Share of all work from which a pace is known: before, most of the time went into the start."""


class RateLimited(Generic[T]):
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
        self.outlook = events.Outlook(0, 0.0)
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
        self._done_before = self._paused_at = 0.0
        self._outlook_done = 0.0
        """Work that was done when the outlook was computed."""
        self._began = clock()
        """Start of this session, later by the time that it was paused."""
        self._front = RateLimited[Front](share=20, least=1.0, clock=clock)

    def apply(self, event: events.Event) -> None:
        """Apply one event; costs next to nothing."""
        with self._lock:
            if isinstance(event, events.SweepStarted | events.SweepFinished):
                self._records = {record.number: record for record in event.records}
            if isinstance(event, events.SweepStarted | events.SweepSteered):
                if self.pause is None:
                    self._paused_at = self._clock()
                elif event.pause is None:
                    self._began += self._clock() - self._paused_at
                self.pause = event.pause
            match event:
                case events.SweepStarted():
                    self._began = self._clock()
                    self._done_before = self._measure_work()
                case events.Outlook():
                    self.outlook, self._outlook_done = event, self._measure_work()
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
            left = self.outlook.work - (done - self._outlook_done)
        seconds = self._clock() - self._began
        return estimate_seconds_left(left, done - self._done_before, seconds, self.outlook.hours)

    def _measure_work(self) -> float:
        latest = {number: measurement.cost for number, measurement in self._latest.items()}
        return measure_work(self._records.values(), latest)


def measure_work(records: Iterable[TrialRecord], latest: Mapping[int, Cost]) -> float:
    """Sum the work of trials; `latest` holds the costs of running ones at their last step."""
    return sum(latest.get(record.number, record.cost).work for record in records)


def estimate_seconds_left(
    left: float, done: float, seconds: float, hours: float | None = None
) -> float | None:
    """Return the time of some work at the pace of `seconds`, at most `hours`; None: unknown."""
    left = max(0.0, left)
    if done <= LEAST_SHARE * (done + left):
        return None
    found = left * seconds / done
    return found if hours is None else min(found, hours * HOUR)
