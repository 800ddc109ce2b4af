"""What a sweep has spent, and whether that is all that it may: pure functions.

Running trials count with what they had spent at their last measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.costs import HOUR, gpu_hours
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec import SweepSpec


@dataclass(frozen=True)
class Spending:
    """What a sweep has spent so far, in the units of `search.budget`."""

    trials: int
    completions: int
    gpu_hours: float
    hours: float


def compute_spending(spec: SweepSpec, records: Sequence[TrialRecord], hours: float) -> Spending:
    """What `records` have cost.

    Args:
        spec: says how many GPUs a trial has.
        records: every trial.
        hours: in which the sweep ran, see `hours_of`.
    """
    return Spending(
        trials=len(records),
        completions=sum(record.cost.completions for record in records),
        gpu_hours=sum(gpu_hours(record.cost, spec.resources.in_all) for record in records),
        hours=hours,
    )


def describe_spent_budget(spec: SweepSpec, records: Sequence[TrialRecord], hours: float) -> str:
    """Which part of `search.budget` is spent, for a person; empty if there is some of each left."""
    budget = spec.search.budget
    if not any((budget.trials, budget.completions, budget.gpu_hours, budget.hours)):
        return ""  # asked before each of many trials, which need not be added up each time
    so_far = compute_spending(spec, records, hours)
    limits = {
        "trials": (so_far.trials, budget.trials),
        "completions": (so_far.completions, budget.completions),
        "GPU-hours": (so_far.gpu_hours, budget.gpu_hours),
        "hours": (so_far.hours, budget.hours),
    }
    for what, (found, limit) in limits.items():
        if limit and found >= limit:
            return f"the budget of {limit:,g} {what} is spent"
    return ""


def hours_of(
    sessions: Sequence[Mapping[str, Any]],
    records: Sequence[TrialRecord],
    now: float | None = None,
) -> float:
    """Hours in which a sweep ran: its sessions together.

    One that was killed lasted until the last start, rung or end of a trial that is known of it.

    Args:
        sessions: in order, each with `started` and, unless it was killed or runs, `finished`.
        records: every trial.
        now: in Unix seconds, as all times here, if the last session still runs; else None.
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
            known = (time for record in records for time in times_of(record))
            end = max((time for time in known if time < following), default=start)
        total += max(0.0, end - start)
    return total / HOUR


def times_of(record: TrialRecord) -> list[float]:
    """When something is known to have happened in a trial, in Unix seconds."""
    times = (record.started, *(rung.recorded for rung in record.rungs), record.finished)
    return [time for time in times if time is not None]
