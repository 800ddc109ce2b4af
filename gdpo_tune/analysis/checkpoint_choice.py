"""Choice of the checkpoints, before the end of their trainings, that may be on the front.

Only validation values decide: those of every measured candidate, and those of a trial at the steps
at which it was evaluated. A checkpoint that another policy dominates there is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gdpo_tune.analysis.pareto import compute_contributions, compute_losses, mark_front
from gdpo_tune.core.trials import Estimate, Objective, Part, TrialRecord


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
    policies: list[tuple[Mapping[str, Estimate], Part | None]] = [
        (record.validation, None)
        for record in records
        if record.state == "complete" and record.feasible is not False
        if record.is_comparable and record.role != "untrained"
    ]
    policies += [
        (rung.validation, Part(record.number, rung.step, 1.0))
        for record in records
        if record.replicate_of is None  # the seeds of a checkpoint follow from the checkpoint
        if record.is_comparable
        for rung in record.rungs
        if rung.step in record.kept_steps
        if is_allowed({name: e.mean for name, e in rung.validation.items()})
    ]
    read = [(read_objectives(estimates, objectives), part) for estimates, part in policies]
    points = [(values, part) for values, part in read if values is not None]
    if not points:
        return []
    values = np.array([values for values, _ in points])
    gains = compute_contributions(values, objectives)
    is_on_front = mark_front(compute_losses(values, objectives))
    order = sorted(range(len(points)), key=lambda index: -gains[index])
    parts = ((points[index][1], is_on_front[index] and gains[index] > 0) for index in order)
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


def read_objectives(
    estimates: Mapping[str, Estimate], objectives: Sequence[Objective]
) -> tuple[float, ...] | None:
    """Return the means of the objectives; None if one is missing or not finite."""
    means = [estimates[o.name].mean if o.name in estimates else np.nan for o in objectives]
    return tuple(means) if np.isfinite(means).all() else None
