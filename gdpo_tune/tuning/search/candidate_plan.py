"""Steps of a sweep that train nothing: merges and checkpoints that are worth an evaluation.

They are spread over the sweep, so that at any time the front is about as good as that much
training allows: once a share s of the trainings has ended, the share sqrt(s) of the budgets may be
spent. The first trainings span the front, and merges of them add most. Merges begin once nearly all
points that span it have been trained: what lies between two neighbours adds little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gdpo_tune.analysis.checkpoint_choice import choose_checkpoint
from gdpo_tune.analysis.merging import choose_merge
from gdpo_tune.core.candidates import Part
from gdpo_tune.core.trials import Objective, Role, TrialRecord
from gdpo_tune.spec import Constraint, SweepSpec
from gdpo_tune.tuning.search.startup import list_corners

Parts = tuple[Part, ...]


def choose_candidate(spec: SweepSpec, records: Sequence[TrialRecord]) -> tuple[Role, Parts] | None:
    """Choose the merge or checkpoint whose turn it is; None if there is none at present."""
    if spec.keep == "none":
        return None
    goals = spec.list_objectives()
    if _has_room(spec, records, "checkpoint", spec.search.checkpoints.budget):
        part = choose_checkpoint(records, goals)
        if part is not None:
            return "checkpoint", (part,)
    merges = spec.search.merges
    if _is_spanned(spec, records) and _has_room(spec, records, "merge", merges.budget):
        parts = choose_merge(records, tighten_references(spec), merges.most_parts)
        if parts is not None:
            return "merge", parts
    return None


def count_candidates(spec: SweepSpec) -> int:
    """Return the most merges and checkpoints that a sweep evaluates."""
    search = spec.search
    return 0 if spec.keep == "none" else search.merges.budget + search.checkpoints.budget


def tighten_references(spec: SweepSpec) -> tuple[Objective, ...]:
    """Return the objectives, with a constraint on one of them as its reference.

    What a merge adds beyond a bound would not count. A parent may break a constraint all the same:
    what lies between it and others may not.
    """
    return tuple(_tighten(goal, spec.constraints.get(goal.name)) for goal in spec.list_objectives())


def _tighten(goal: Objective, constraint: Constraint | None) -> Objective:
    stricter = {("maximize", ">="): max, ("minimize", "<="): min}
    if constraint is None or (goal.direction, constraint.op) not in stricter:
        return goal
    choose = stricter[goal.direction, constraint.op]
    return replace(goal, reference=choose(goal.reference, constraint.bound))


def _has_room(spec: SweepSpec, records: Sequence[TrialRecord], role: Role, budget: int) -> bool:
    """Return whether the ended share of the trainings allows one more candidate of a role."""
    spent = sum(record.role == role for record in records)
    if spent >= budget:
        return False
    share = min(1.0, _count_ended(records) / spec.search.trials)
    return spent < int(budget * math.sqrt(share))


def _is_spanned(spec: SweepSpec, records: Sequence[TrialRecord]) -> bool:
    """Return whether as many trainings have ended as the reward weights have corners, or all."""
    return _count_ended(records) >= min(len(list_corners(spec)), spec.search.trials)


def _count_ended(records: Sequence[TrialRecord]) -> int:
    trained = (record for record in records if record.role in ("search", "member"))
    return sum(not record.is_open for record in trained)
