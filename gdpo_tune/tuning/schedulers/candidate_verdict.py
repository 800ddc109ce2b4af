"""Verdict on a merge or a checkpoint once it was evaluated on validation prompts.

Test prompts cost more than validation prompts, and are for candidates that may matter. So a
candidate is stopped if it breaks a constraint on validation prompts, if a complete one dominates it
there, or if it adds next to nothing to what they cover. Fresh seeds of a candidate always continue:
they say how certain its values are.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.analysis.pareto import compute_hypervolume, rank_points
from gdpo_tune.core.text import format_first
from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.schedulers.base import read_values

MAX_NAMED = 3
"""Number of dominating candidates that an explanation names."""
LEAST_GAIN = 0.002
"""Share of the validation hypervolume that a candidate has to add."""


def explain_stop(
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
    rivals = {
        other.name: tuple(other.validation[name].mean for name in spec.objectives)
        for other in records
        if other.state == "complete"
        and other.is_comparable
        and other.feasible
        and other.role != "untrained"
    }
    return _explain_dominance(values, rivals, spec) or _explain_gain(values, rivals, spec)


def _explain_dominance(
    values: tuple[float, ...], rivals: dict[str, tuple[float, ...]], spec: SweepSpec
) -> str:
    goals = spec.list_objectives()
    names = [n for n, own in rivals.items() if list(rank_points([own, values], goals)) == [0, 1]]
    return f"dominated on validation prompts by {format_first(names, MAX_NAMED)}" if names else ""


def _explain_gain(
    values: tuple[float, ...], rivals: dict[str, tuple[float, ...]], spec: SweepSpec
) -> str:
    goals = spec.list_objectives()
    before = compute_hypervolume([*rivals.values()], goals) if rivals else 0.0
    gain = compute_hypervolume([*rivals.values(), values], goals) - before
    if gain > LEAST_GAIN * before or not before:
        return ""
    return f"adds {gain / before:.2%} to the hypervolume on validation prompts"
