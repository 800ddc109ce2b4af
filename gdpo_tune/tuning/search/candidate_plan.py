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
from gdpo_tune.core.trials import Objective, Part, Role, TrialRecord
from gdpo_tune.spec import Constraint, SweepSpec
from gdpo_tune.spec.search_section import MERGES_PER_TRAINING
from gdpo_tune.tuning.search.startup import list_corners

Parts = tuple[Part, ...]


def choose_candidate(
    spec: SweepSpec, records: Sequence[TrialRecord], *, at_end: bool = False
) -> tuple[Role, Parts] | None:
    """Choose the merge or checkpoint whose turn it is; None if there is none at present.

    `at_end` says that no training will start any more, although fewer than planned have ended.
    """
    if not spec.has_candidates:
        return None
    search = spec.search
    trained = sum(r.role in ("search", "member") and not r.is_open for r in records)
    share = 1.0 if at_end else math.sqrt(min(1.0, trained / search.trials))
    if _count(records, "checkpoint") < int(share * search.checkpoints.budget):
        part = choose_checkpoint(records, spec.list_objectives(), spec.meets_constraints)
        if part is not None:
            return "checkpoint", (part,)
    is_spanned = at_end or trained >= min(len(list_corners(spec)), search.trials)
    allowed = min(int(share * search.merges.budget), MERGES_PER_TRAINING * trained)
    if is_spanned and _count(records, "merge") < allowed:
        parts = choose_merge(records, tighten_references(spec), search.merges.most_parts)
        if parts is not None:
            return "merge", parts
    return None


def count_candidates(spec: SweepSpec) -> int:
    """Return the most merges and checkpoints that a sweep evaluates, fresh seeds included."""
    search = spec.search
    most = search.most_merges + search.checkpoints.budget if spec.has_candidates else 0
    return most + search.replicates.max_trainings * (most > 0)


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
    return replace(goal, reference=choose(goal.reference, constraint.limit))


def _count(records: Sequence[TrialRecord], role: Role) -> int:
    return sum(record.role == role for record in records)
