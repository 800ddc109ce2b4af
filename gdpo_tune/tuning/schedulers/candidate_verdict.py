"""Verdict on a merge or a checkpoint once it was evaluated on validation prompts.

Test prompts are for candidates that may be on the front. So a candidate is stopped if it breaks a
constraint on validation prompts, or if a complete one dominates it there. Fresh seeds of a
candidate always continue: they say how certain its values are.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.analysis.pareto import rank_points
from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.schedulers.base import read_values

MAX_NAMED = 3
"""Number of dominating candidates that an explanation names."""


def find_objection(
    record: TrialRecord, rung: Rung, records: Sequence[TrialRecord], spec: SweepSpec
) -> str:
    """Explain why a candidate gets no test evaluation; empty if it gets one."""
    if record.replicate_of is not None:
        return ""
    values, excess = read_values(spec, rung)
    broken = [
        f"{name} {rung.validation[name].mean:.3g} is not {bound}"
        for (name, bound), over in zip(spec.constraints.items(), excess, strict=True)
        if over > 0
    ]
    if broken:
        return f"breaks a constraint on validation prompts: {', '.join(broken)}"
    rivals = [
        other
        for other in records
        if other.state == "complete" and other.feasible and other.role != "untrained"
    ]
    goals = spec.list_objectives()
    names = [
        other.name
        for other in rivals
        if list(rank_points([_read_means(other, spec), values], goals)) == [0, 1]
    ]
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"dominated on validation prompts by {', '.join(names[:MAX_NAMED])}{more}"


def _read_means(record: TrialRecord, spec: SweepSpec) -> tuple[float, ...]:
    return tuple(record.validation[name].mean for name in spec.objectives)
