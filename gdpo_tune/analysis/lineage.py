"""The policy of a population member as the result of one training with a schedule.

A member that takes over another one's training continues that one's checkpoint, seed and
parameters. So one training gives its policy: it has the parameters of the first trial in the
lineage until that trial's step, then those of the next, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gdpo_tune.core.trial_config import Segment
from gdpo_tune.core.trials import Params, TrialRecord


@dataclass(frozen=True)
class Training:
    """One training from start to end."""

    began_as: int
    """Number of the trial that began it."""
    params: Params
    """All parameters at the start."""
    seed: int
    schedule: tuple[Segment, ...] = ()


def trace_training(records: Sequence[TrialRecord], number: int, step: float = math.inf) -> Training:
    """Return the training that gives a trial's policy, or its checkpoint at a step.

    A replicate is the training of the trial that it repeats, with its own seed. Takeovers from the
    step on are left out. `records` holds every trial at the index of its number.
    """
    record = records[number]
    if record.replicate_of is not None:
        return replace(trace_training(records, record.replicate_of, step), seed=record.seed)
    exploits = [exploit for exploit in record.lineage if exploit.step < step]
    if not exploits:
        return Training(number, record.params, record.seed)
    last = exploits[-1]
    before = trace_training(records, last.donor, last.step)
    return replace(before, schedule=(*before.schedule, Segment(last.step, last.params)))


def stretch_schedule(schedule: Sequence[Segment], factor: float) -> tuple[Segment, ...]:
    """Return the schedule for a training of `factor` times as many steps."""
    return tuple(replace(segment, step=round(segment.step * factor)) for segment in schedule)
