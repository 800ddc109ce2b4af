"""The merge of a sweep's policies that best meets a target.

    --toward "length >= 0.6, format >= 0.8"    conditions, as in a pick
    --prefer correctness=2,length=1            weights of objectives in what is maximised

Conditions and preferences may stand together. Without preferences, the objectives that no condition
names count equally; if conditions name all, all count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote

from gdpo_tune.analysis.merge_choice import Aim, MergeChooser, list_merge_parents
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.metrics import Condition
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import format_estimate, join_names, show, suggest
from gdpo_tune.core.trials import Estimate, Objective, Part
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import parse_conditions
from gdpo_tune.spec import SweepSpec


@dataclass(frozen=True)
class MergeTarget:
    """Conditions that a merge has to meet, and what it maximises beyond them."""

    toward: str
    prefer: str
    conditions: tuple[Condition, ...]
    """Those of `toward`."""
    preferences: Mapping[str, float]
    """Objective -> weight, as `prefer` states them."""

    @property
    def text(self) -> str:
        """The target, for a person."""
        return " and ".join(filter(None, [self.toward, self.prefer and f"prefer {self.prefer}"]))


def parse_target(toward: str, prefer: str) -> MergeTarget:
    """Parse a target; either text may be empty, and a wrong one raises a UsageError."""
    preferences = parse_shares(prefer, "--prefer", "correctness=2,length=1") if prefer else {}
    return MergeTarget(toward, prefer, parse_conditions(toward) if toward else (), preferences)


def parse_shares(text: str, option: str, example: str) -> dict[str, float]:
    """Parse `name=number,name=number`, all above 0; a wrong text raises a UsageError."""
    shares: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not name or not 0 < share < math.inf:
            reason = "a name, = and a number above 0 are expected"
            raise UsageError(f"{option} {text!r}: {entry!r}: {reason}\n    fix: write {example}")
        if name in shares:
            raise UsageError(f"{option} {text!r}: {name} stands twice\n    fix: write it once")
        shares[name] = share
    return shares


def build_aim(target: MergeTarget, spec: SweepSpec) -> Aim:
    """Return a target in numbers; the constraints of the sweep count among its conditions.

    Training costs are ignored; a merge has none. A relative constraint without a measured baseline
    limits nothing. A UsageError names an unknown metric, or a preference that is no objective.
    """
    measured = load_task_info(spec.task, spec.space.domains).metrics
    goals = {goal.name: goal for goal in spec.list_objectives() if goal.name in measured}
    names = [*goals, *sorted(measured.keys() - goals)]
    for condition in target.conditions:
        if condition.metric not in names:
            guess = suggest(condition.metric, names)
            reason = f"{condition.metric!r}: {guess}a merge has no such metric"
            fix = f"the metrics of this task are {join_names(names)}"
            raise PickError(target.toward, condition.position, reason, fix)
    for name in target.preferences:
        if name not in goals:
            raise UsageError(
                f"--prefer {target.prefer!r}: {name!r}: {suggest(name, goals)}this is no objective"
                f"\n    fix: name some of {join_names(goals)}"
            )
    own = {condition.metric for condition in target.conditions}
    constraints = (
        Condition(name, constraint.op, constraint.limit)
        for name, constraint in spec.constraints.items()
        if name in names and constraint.is_known
    )
    limits = (*target.conditions, *constraints)
    others = sorted({limit.metric for limit in limits} - goals.keys(), key=names.index)
    metrics = [*goals.values(), *(Objective(n, measured[n].direction, 0.0) for n in others)]
    free = [name for name in goals if name not in own]
    preferences = target.preferences or dict.fromkeys(free or goals, 1.0)
    return Aim(tuple(metrics), limits, tuple(preferences.get(m.name, 0.0) for m in metrics))


@dataclass(frozen=True)
class RequestedMerge:
    """A merge that was chosen for a target, or given by its weights."""

    parts: tuple[Part, ...]
    prediction: Mapping[str, Estimate]
    """Expected values on validation prompts; empty if it was given."""
    limits: tuple[Condition, ...]
    """Conditions that it has to meet; none if it was given."""


def choose_next_merge(sweep: Sweep, target: MergeTarget, source: str) -> RequestedMerge:
    """Choose the merge to evaluate next; `source` names the sweep in errors.

    Raises:
        UsageError: fewer than two policies lie near the front, none of their merges is expected to
            meet the target, or all are evaluated.
    """
    aim = build_aim(target, sweep.spec)
    parents, known = list_merge_parents(sweep.records, aim.metrics)
    if len(parents) < 2:
        has = "one policy" if parents else "no policies"
        raise UsageError(
            f"{source}: a merge has two parts or more, and that sweep (keep: {sweep.spec.keep}) "
            f"has {has} near its front\n    fix: let it continue, name the parts with --weights, "
            "or search with keep: all"
        )
    chosen = MergeChooser(aim, parents, known).choose_next(sweep.spec.search.merges.most_parts)
    if chosen is None:
        raise UsageError(
            f"{source}: every merge that could be chosen of its {len(parents)} policies is "
            f"evaluated\n    fix: take one: python -m gdpo_tune.report {quote(source)}"
        )
    merge, is_hopeful = chosen
    parts = tuple(Part(*policy, weight) for policy, weight in sorted(merge.mixture.items()))
    losses = zip(aim.metrics, merge.losses, merge.errors, strict=True)
    prediction = {
        metric.name: Estimate(float(-x if metric.direction == "maximize" else x), float(error))
        for metric, x, error in losses
    }
    if not is_hopeful:
        broken = [c for c in aim.limits if not c.holds(prediction[c.metric].mean)]
        names = dict.fromkeys(condition.metric for condition in broken)
        has = ", ".join(f"{name} {format_estimate(prediction[name])}" for name in names)
        weights = ",".join(f"{part.trial}@{part.step}={show(part.weight)}" for part in parts)
        raise UsageError(
            f"{target.text!r}: no merge of the policies of {source} is expected to meet this: the "
            f"closest, {weights}, is expected to have {has} on validation prompts\n    fix: loosen "
            f"{' and '.join(map(str, broken))}, or search with them as `constraints:`; the closest "
            f"is evaluated by python -m gdpo_tune.merge {quote(source)} --weights {weights}"
        )
    return RequestedMerge(parts, prediction, aim.limits)
