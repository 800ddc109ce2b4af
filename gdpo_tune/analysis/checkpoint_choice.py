"""Choice of the checkpoints, before the end of their trainings, that may be on the front.

Only validation values decide: those of every measured candidate, and those of a trial at the steps
at which it was evaluated. A checkpoint that another policy dominates there is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdpo_tune.analysis.pareto import compute_contributions, compute_losses, mark_front
from gdpo_tune.core.candidates import Part
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord


@dataclass(frozen=True)
class _Point:
    """A policy with validation values; with a part if it is a checkpoint before the end."""

    values: tuple[float, ...]
    part: Part | None = None


def rank_checkpoints(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    is_allowed: Callable[[Mapping[str, float]], bool],
) -> list[Part]:
    """Return the kept checkpoints on the validation front, the largest contribution first.

    The contribution is the hypervolume that the front would lose without it. Checkpoints are those
    of `TrialRecord.kept_steps` whose metrics are allowed, that is, meet the constraints; ends and
    other candidates count if they are complete and feasible.
    """
    allowed = _list_checkpoints(records, objectives, is_allowed)
    points = [*_list_candidates(records, objectives), *allowed]
    if not points:
        return []
    values = np.array([point.values for point in points])
    gains = compute_contributions(values, objectives)
    is_on_front = mark_front(compute_losses(values, objectives))
    order = sorted(range(len(points)), key=lambda index: -gains[index])
    parts = ((points[index].part, is_on_front[index] and gains[index] > 0) for index in order)
    return [part for part, is_chosen in parts if part is not None and is_chosen]


def choose_checkpoint(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    is_allowed: Callable[[Mapping[str, float]], bool],
) -> Part | None:
    """Choose the checkpoint to evaluate next; None if none that remains is on the front.

    The arguments are those of `rank_checkpoints`.
    """
    tried = {record.parts for record in records if record.role == "checkpoint"}
    ranked = rank_checkpoints(records, objectives, is_allowed)
    return next((part for part in ranked if (part,) not in tried), None)


def _list_candidates(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> Iterator[_Point]:
    for record in records:
        is_usable = record.state == "complete" and record.feasible is not False
        if not is_usable or not record.is_comparable or record.role == "untrained":
            continue
        if (values := read_objectives(record.validation, objectives)) is not None:
            yield _Point(values)


def _list_checkpoints(
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    is_allowed: Callable[[Mapping[str, float]], bool],
) -> Iterator[_Point]:
    for record in records:
        if record.replicate_of is not None or not record.is_comparable:
            continue  # the seeds of a checkpoint follow from the checkpoint
        for rung in record.rungs:
            if rung.step not in record.kept_steps:
                continue
            if is_allowed({name: e.mean for name, e in rung.validation.items()}):
                values = read_objectives(rung.validation, objectives)
                if values is not None:
                    yield _Point(values, Part(record.number, rung.step, 1.0))


def read_objectives(
    estimates: Mapping[str, Estimate], objectives: Sequence[Objective]
) -> tuple[float, ...] | None:
    """Return the means of the objectives; None if one is missing or not finite."""
    means = [estimates[o.name].mean if o.name in estimates else np.nan for o in objectives]
    return tuple(means) if np.isfinite(means).all() else None
