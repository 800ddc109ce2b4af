"""Wishes for a merge, as a person writes them.

    --toward "length >= 0.6, format >= 0.8"    conditions, as in a pick
    --prefer correctness=2,length=1            weights of objectives in what is maximised
    --weights 7=0.3,12@40=0.7                  the merge itself

Conditions and preferences may stand together. Without preferences, the objectives that no condition
names count equally; if conditions name all, all count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gdpo_tune.analysis.wish_choice import Aim, Limit
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.metrics import MetricInfo
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Objective
from gdpo_tune.results.pick_language import Bound, Metric, parse_conditions
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.text import join_names, show, suggest

WORDS = {">=": "ge", "<=": "le", ">": "gt", "<": "lt"}
"""Comparison -> what it is in the name of a directory."""


@dataclass(frozen=True)
class Wish:
    """Conditions that a merge has to meet, and what it maximises beyond them."""

    toward: str
    prefer: str
    bounds: tuple[Bound, ...]
    """Conditions of `toward`."""
    preferences: Mapping[str, float]
    """Objective -> weight, as `prefer` states them."""

    def __str__(self) -> str:
        return " and ".join(filter(None, [self.toward, self.prefer and f"prefer {self.prefer}"]))

    @property
    def label(self) -> str:
        """Part of a directory's name: `length-ge-0.6`."""
        words = [f"{b.metric.name}-{WORDS[b.comparison]}-{show(b.limit)}" for b in self.bounds]
        words += [f"{name}-{show(weight)}" for name, weight in self.preferences.items()]
        return "-".join(words)


def parse_wish(toward: str, prefer: str) -> Wish:
    """Parse a wish; either text may be empty.

    Raises:
        UsageError: a text has another form.
    """
    bounds = parse_conditions(toward) if toward else ()
    preferences = parse_shares(prefer, "--prefer", "correctness=2,length=1") if prefer else {}
    return Wish(toward, prefer, bounds, preferences)


def parse_shares(text: str, option: str, example: str) -> dict[str, float]:
    """Parse `name=number,name=number`; every number is above 0.

    Raises:
        UsageError: the text has another form, or a name stands twice.
    """
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


def build_aim(wish: Wish, spec: SweepSpec) -> Aim:
    """Return a wish in numbers; the constraints of the sweep count among its conditions.

    Costs of trainings count in nothing: a merge has none.

    Raises:
        PickError, UsageError: the wish names an unknown metric, or a preference no objective.
    """
    measured = _get_metrics(spec)
    goals = {goal.name: goal for goal in spec.list_objectives() if goal.name in measured}
    names = [*goals, *sorted(measured.keys() - goals)]
    for name, position in (bound.metric for bound in wish.bounds):
        if name not in names:
            reason = f"{name!r}: {suggest(name, names)}a merge has no such metric"
            fix = f"the metrics of this task are {join_names(names)}"
            raise PickError(wish.toward, position, reason, fix)
    for name in wish.preferences:
        if name not in goals:
            raise UsageError(
                f"--prefer {wish.prefer!r}: {name!r}: {suggest(name, goals)}this is no objective\n"
                f"    fix: name some of {join_names(goals)}"
            )
    bounds = list_conditions(wish, spec)
    limited = {bound.metric.name for bound in bounds}
    others = [name for name in names if name in limited and name not in goals]
    metrics = [*goals.values(), *(Objective(n, measured[n].direction, 0.0) for n in others)]
    free = [name for name in goals if name not in {b.metric.name for b in wish.bounds}]
    preferences = wish.preferences or dict.fromkeys(free or goals, 1.0)
    limits = tuple(Limit(b.metric.name, b.comparison[0] == ">", b.limit) for b in bounds)
    return Aim(tuple(metrics), limits, tuple(preferences.get(m.name, 0.0) for m in metrics))


def list_conditions(wish: Wish, spec: SweepSpec) -> tuple[Bound, ...]:
    """Return the conditions of a wish and the constraints of the sweep, without those on costs.

    A constraint relative to a baseline that was not measured limits nothing.
    """
    constraints = (
        Bound(Metric(name, 1), constraint.op, constraint.limit)
        for name, constraint in spec.constraints.items()
        if name in _get_metrics(spec) and constraint.is_known
    )
    return (*wish.bounds, *constraints)


def _get_metrics(spec: SweepSpec) -> Mapping[str, MetricInfo]:
    return load_task_info(spec.task, spec.space.domains).metrics


def name_directory(weights: Mapping[str, float]) -> str:
    """Return the part of a directory's name for given weights: `7-0.3-12@40-0.7`."""
    label = "-".join(f"{name}-{show(weight)}" for name, weight in weights.items())
    return re.sub(r"[^\w.@-]", "-", label)
