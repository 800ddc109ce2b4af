"""What a member of a population ends with, as one training: where it began, and what changed when.

A member that takes over another one's training goes on with that one's checkpoint, seed and
parameters, so its policy is what one training gives that had the values of its lineage: those of
the first trial in it until its step, then those of the next, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gdpo_tune.core.trials import Params, Segment, TrialRecord


@dataclass(frozen=True)
class Training:
    """One training from start to end."""

    began_as: int
    """Number of the trial that began it."""
    params: Params
    """Complete, as it begins."""
    seed: int
    schedule: tuple[Segment, ...] = ()


def training_of(records: Sequence[TrialRecord], number: int) -> Training:
    """The training that a trial's policy comes from.

    A replicate is the training of the trial that it repeats, with its own seed.

    Args:
        records: every trial, by number.
        number: of the trial.
    """
    record = records[number]
    if record.replicate_of is not None:
        return replace(training_of(records, record.replicate_of), seed=record.seed)
    return _until(records, number, math.inf)


def stretched(schedule: Sequence[Segment], share: float) -> tuple[Segment, ...]:
    """A schedule for a training of `share` times as many steps."""
    return tuple(replace(segment, step=round(segment.step * share)) for segment in schedule)


def _until(records: Sequence[TrialRecord], number: int, step: float) -> Training:
    """The same up to a step, at which the trial itself took nothing over."""
    record = records[number]
    exploits = [exploit for exploit in record.lineage if exploit.step < step]
    if not exploits:
        return Training(number, record.params, record.seed)
    last = exploits[-1]
    before = _until(records, last.donor, last.step)
    return replace(before, schedule=(*before.schedule, Segment(last.step, last.params)))
