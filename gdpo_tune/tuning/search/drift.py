"""What a trial that is not at its end will come to, or would have: a guess for the sampler.

Stopped trials are most of a sweep, and those that a sampler does not see it proposes again; those
that still run are most of what there is to learn from while a sweep is young. Their values at a
rung are not comparable with values at full budget. So each gets the median change from that rung to
the end over the trials that ran to their end.

The guess rests on the first so many of those trials, by the time of their end, and on more of them
only in leaps: every change of it moves all of those, and a new process with the same records
has to guess the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.spec import SweepSpec

ONE_BY_ONE = 8
"""Up to so many trials, each one counts as soon as it ends; then a quarter more at a time."""


class Drift:
    """Median changes from a rung to the end, over complete trials."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._complete: dict[int, TrialRecord] = {}
        self._known: dict[tuple[int, str], float] = {}
        self._leap = 0

    def add(self, record: TrialRecord) -> bool:
        """Take in a complete trial; return whether the guess rests on more trials than before."""
        self._complete[record.number] = record
        leap = count_used(len(self._complete))
        grown = leap > self._leap
        if grown:
            self._leap = leap
            self._known.clear()
        return grown

    def estimate_final(self, rung: Rung) -> dict[str, float]:
        """Every metric that the sweep judges by, as it would be at the end; no change is known from
        a rung that no complete trial has."""
        return {
            name: rung.validation[name].mean + self._change(rung.completions, name)
            for name in self._spec.judged
        }

    def _change(self, completions: int, name: str) -> float:
        key = (completions, name)
        if key not in self._known:
            changes = [
                record.validation[name].mean - rung.validation[name].mean
                for record in self._counted()
                for rung in record.rungs
                if rung.completions == completions
            ]
            self._known[key] = median(changes) if changes else 0.0
        return self._known[key]

    def _counted(self) -> Collection[TrialRecord]:
        return sorted(self._complete.values(), key=_end)[: self._leap]


def _end(record: TrialRecord) -> tuple[float, int]:
    return math.inf if record.finished is None else record.finished, record.number


def count_used(count: int) -> int:
    """How many of `count` complete trials the guess rests on."""
    leap = min(count, ONE_BY_ONE)
    while leap >= ONE_BY_ONE and leap + leap // 4 <= count:
        leap += leap // 4
    return leap


def find_last_rung(record: TrialRecord, *, under_way: bool) -> Rung | None:
    """The newest rung of a trial that has not come to its end, and may never; None without one.

    Args:
        record: the trial.
        under_way: whether one counts that runs and never waited.
    """
    counts = record.state in ("pruned", "paused")
    if record.state == "running":
        counts = under_way or record.paused_at > 0
    return record.rungs[-1] if counts and record.rungs else None
