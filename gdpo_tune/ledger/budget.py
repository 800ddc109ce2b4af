"""Budget of a sweep: the trials started, the cost and hours spent, and the clock of the hours."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdpo_tune.core.metrics import HOUR, count_gpu_hours
from gdpo_tune.core.trials import TrialRecord, title_candidate
from gdpo_tune.spec import SweepSpec


def count_started(records: Sequence[TrialRecord]) -> int:
    """Count the configurations that were started, without baselines, replicates and added ones."""
    return sum(record.role == "search" and not record.request for record in records)


def compute_spending(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float
) -> dict[str, float]:
    """Sum the costs of trials, a running one's at its last measurement.

    Names and units are those of `search.budget`.
    """
    return {
        "trials": sum(not record.parts for record in records),
        "completions": sum(record.cost.completions for record in records),
        "gpu_hours": sum(
            count_gpu_hours(record.cost, spec.resources.total_gpus) for record in records
        ),
        "hours": hours,
    }


def find_at_target(spec: SweepSpec, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the first trial that meets `search.target` on validation and on test prompts."""
    for record in records if spec.search.target else ():
        tested = record.state == "complete" and record.feasible
        if tested and spec.meets_target(record.validation) and spec.meets_target(record.test):
            return record
    return None


def describe_spent_budget(spec: SweepSpec, records: Sequence[TrialRecord], hours: float) -> str:
    """Describe why nothing more may train: a spent part of `search.budget`, or `search.target` met.

    It is empty if some of every part is left and no policy meets the target.
    """
    if met := find_at_target(spec, records):
        return f"{title_candidate(met.name)} meets search.target"
    budget = spec.search.budget
    if not any((budget.trials, budget.completions, budget.gpu_hours, budget.hours)):
        return ""  # saves adding up all trials before each new one
    for name, value in compute_spending(spec, records, hours).items():
        limit = getattr(budget, name)
        if limit and value >= limit:
            return f"the budget of {limit:,g} {name.replace('gpu_', 'GPU-')} is spent"
    return ""


def compute_hours(
    sessions: Sequence[Mapping[str, Any]],
    records: Sequence[TrialRecord],
    now: float | None = None,
    pauses: Sequence[tuple[float, float]] = (),
) -> float:
    """Sum the hours of a sweep's sessions, as `Ledger.get_sessions`, without gaps and pauses.

    A killed session counts until its last recorded start, rung or end of a trial, a running one
    until `now`. `pauses`: start and end in Unix seconds; the end may be infinite.
    """
    total = 0.0
    for index, session in enumerate(sessions):
        start = float(session["started"])
        last = index + 1 == len(sessions)
        if "finished" in session:
            end = float(session["finished"])
        elif last and now is not None:
            end = now
        else:
            following = math.inf if last else float(sessions[index + 1]["started"])
            times = (time for record in records for time in record.times)
            end = max((time for time in times if time < following), default=start)
        gaps = [gap for gap in session.get("gaps", ()) if gap[0] <= end]
        worked, reach = end - start - sum(min(0.0, seconds) for _, seconds in gaps), start
        idle = [*pauses, *((until - max(0.0, seconds), until) for until, seconds in gaps)]
        for since, until in sorted(idle):  # they may overlap
            worked -= max(0.0, min(end, until) - max(reach, since))
            reach = max(reach, min(end, until))
        total += max(0.0, worked)
    return total / HOUR


class WorkClock(threading.Thread):
    """Gaps in the work of this process: it was stopped, the machine slept, or its clock was set.

    CLOCK_MONOTONIC stands still while the machine sleeps, and no clock setting
    moves it (clock_gettime(2)); a stopped process does not tick (signal(7)).
    """

    TICK, STOPPED, LEAST = 1.0, 10.0, 2.0
    """Seconds between two ticks, without a tick in a process that was stopped, and of a gap."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(name="work-clock", daemon=True)
        self._clocks = wall, monotonic
        self._last = wall(), monotonic()
        self._gaps: list[tuple[float, float]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        """Tick until the end."""
        while not self.ended.wait(self.TICK):
            self.tick()

    def tick(self) -> None:
        """Compare both clocks with their last readings."""
        last, self._last = self._last, tuple(clock() for clock in self._clocks)
        passed, elapsed = (now - then for now, then in zip(self._last, last, strict=True))
        gap = passed - (elapsed if elapsed < self.STOPPED else 0.0)
        if abs(gap) >= self.LEAST:
            self._gaps.append((self._last[0], gap))

    def take_gaps(self) -> list[tuple[float, float]]:
        """Return the gaps since the last call: end in Unix seconds, and length in seconds.

        A negative length says that the clock was set back.
        """
        gaps, self._gaps = self._gaps, []
        return gaps
