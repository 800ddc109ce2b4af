"""Estimate of a trial's final values from its last rung, for the sampler.

Stopped trials are most of a sweep, and a sampler that does not see them proposes them again. Early
in a sweep, most of its information is in trials that still run. Values at a rung are not comparable
with values at full budget. So each such trial gets the median change from that rung to the end,
over complete trials.

The estimate uses the first complete trials, by the time of their end. Their number grows in steps:
every change of it moves all estimates. A new process with the same records estimates the same.
"""

from __future__ import annotations

import math
from statistics import median

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.spec import SweepSpec

ONE_BY_ONE = 8
"""Number of trials up to which each one counts at once; then a quarter more at a time."""


class Drift:
    """Median changes from each rung to the end, over complete trials."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._complete: dict[int, TrialRecord] = {}
        self._changes: dict[tuple[int, str], float] = {}
        """(Completions, metric) -> median change, as far as computed."""
        self._used = 0

    def add(self, record: TrialRecord) -> bool:
        """Take in a complete trial; return whether estimates now use more trials than before."""
        self._complete[record.number] = record
        used = count_used(len(self._complete))
        grown = used > self._used
        if grown:
            self._used = used
            self._changes.clear()
        return grown

    def estimate_final(self, rung: Rung) -> dict[str, float]:
        """Estimate the final value of every objective and constraint metric.

        If no complete trial has such a rung, the values at the rung stay as they are.
        """
        return {
            name: rung.validation[name].mean + self._estimate_change(rung.completions, name)
            for name in self._spec.judged_metrics
        }

    def _estimate_change(self, completions: int, name: str) -> float:
        key = (completions, name)
        if key not in self._changes:
            by_end = sorted(
                self._complete.values(),
                key=lambda r: (math.inf if r.finished is None else r.finished, r.number),
            )
            changes = [
                record.validation[name].mean - rung.validation[name].mean
                for record in by_end[: self._used]
                for rung in record.rungs
                if rung.completions == completions
            ]
            self._changes[key] = median(changes) if changes else 0.0
        return self._changes[key]


def count_used(count: int) -> int:
    """Return how many of `count` complete trials the estimate uses."""
    used = min(count, ONE_BY_ONE)
    while used >= ONE_BY_ONE and used + used // 4 <= count:
        used += used // 4
    return used


def find_last_rung(record: TrialRecord, *, under_way: bool) -> Rung | None:
    """Return the newest rung of a stopped, waiting or running trial; None if it has none.

    A running trial that has never waited counts only if `under_way`.
    """
    counts = record.state in ("pruned", "paused")
    if record.state == "running":
        counts = under_way or record.paused_at > 0
    return record.rungs[-1] if counts and record.rungs else None
