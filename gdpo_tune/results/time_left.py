"""The time left of a sweep, at its pace so far; one unit of work is the training of one trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gdpo_tune.core.trials import TrialRecord

ENDED = ("complete", "pruned", "failed")
"""States of a trial in which nothing more follows."""
EVALUATION = 0.1
"""Time of a trial that trains nothing, as a share of a training's."""
LEAST_WORK = 0.1
"""Work that has to be done before the pace is known."""


def measure_planned_work(planned: int, candidates: int) -> float:
    """Return the work of so many trials, `candidates` of which train nothing."""
    return planned - (1 - EVALUATION) * candidates


def measure_work_done(
    records: Iterable[TrialRecord], latest_steps: Mapping[int, int], steps: int
) -> float:
    """Return the work of the trials that ended, and the shares of the running ones.

    `latest_steps` holds the last step of each running trial, by number, of `steps` in all.
    """
    ended = sum(
        1.0 if not record.parts else EVALUATION for record in records if record.state in ENDED
    )
    return ended + sum(min(step / steps, 1.0) for step in latest_steps.values())


def estimate_seconds_left(
    planned_work: float, done: float, done_before: float, seconds: float
) -> float | None:
    """Return the time left; None while too little is done.

    In the last `seconds` the work done grew from `done_before` to `done`.
    """
    gained = done - done_before
    left = max(0.0, planned_work - done)
    return None if gained < LEAST_WORK else left * seconds / gained
