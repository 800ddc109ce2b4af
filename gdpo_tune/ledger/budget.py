"""Spending of a sweep against its budget: pure functions.

A running trial counts with its cost at its last measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_tune.core.metrics import HOUR, count_gpu_hours
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec import SweepSpec


def compute_spending(
    spec: SweepSpec, records: Sequence[TrialRecord], hours: float
) -> dict[str, float]:
    """Sum the costs of trials, by the names and in the units of `search.budget`."""
    return {
        "trials": sum(not record.parts for record in records),
        "completions": sum(record.cost.completions for record in records),
        "gpu_hours": sum(
            count_gpu_hours(record.cost, spec.resources.total_gpus) for record in records
        ),
        "hours": hours,
    }


def describe_spent_budget(spec: SweepSpec, records: Sequence[TrialRecord], hours: float) -> str:
    """Describe which part of `search.budget` is spent; empty if some of every part is left."""
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
    """Sum the hours of a sweep's sessions, which are in order, without its pauses.

    Each has `started` and, unless it was killed or runs, `finished`, in Unix seconds. A killed one
    counts until its last recorded start, rung or end of a trial, a running one until `now`.
    `pauses` are the start and end of each pause, in Unix seconds; the end may be infinite.
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
            times = (
                time
                for record in records
                for time in (record.started, *(r.recorded for r in record.rungs), record.finished)
            )
            end = max((t for t in times if t is not None and t < following), default=start)
        paused = (min(end, until) - max(start, since) for since, until in pauses)
        total += max(0.0, end - start) - sum(max(0.0, seconds) for seconds in paused)
    return total / HOUR
