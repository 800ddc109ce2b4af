"""Data of the report's panel that chooses a policy: limits, and the members of the front.

The page applies them as `--pick` does: `picking` and assets/choice.js follow the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gdpo_tune.analysis.front import Front, grade_keeping, name_extreme
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.text import abbreviate_parameter

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

STEPS = 50
"""Least steps of a slider."""


@dataclass(frozen=True)
class Slider:
    """Acceptable values of one metric."""

    name: str
    comparison: Literal[">=", "<="]
    low: float
    high: float
    step: float

    @property
    def loosest(self) -> float:
        """The end that every member satisfies; there the metric has no limit."""
        return self.low if self.comparison == ">=" else self.high

    @property
    def label(self) -> str:
        """Name of the control."""
        bound = "at least" if self.comparison == ">=" else "at most"
        return f"{abbreviate_parameter(self.name)} {bound}"


def list_sliders(spec: SweepSpec, front: Front) -> list[Slider]:
    """Return a slider per objective, and per constraint on another metric of the members."""
    comparisons: dict[str, Literal[">=", "<="]] = {
        goal.name: ">=" if goal.direction == "maximize" else "<=" for goal in front.objectives
    }
    for name, constraint in spec.constraints.items():
        comparisons.setdefault(name, constraint.op)
    sliders: list[Slider] = []
    for name, comparison in comparisons.items():
        values = [member.mean[name].mean for member in front.members if name in member.mean]
        if values and all(map(math.isfinite, values)):
            sliders.append(_build_slider(name, comparison, values))
    return sliders


def _build_slider(name: str, comparison: Literal[">=", "<="], values: Sequence[float]) -> Slider:
    """Return a slider over the members' values, its ends on whole steps."""
    span = (max(values) - min(values)) or abs(values[0]) or 1.0
    exponent = math.floor(math.log10(span / STEPS))
    step = 10.0**exponent
    low, high = math.floor(min(values) / step), math.ceil(max(values) / step)
    digits = max(0, -exponent)
    return Slider(
        name, comparison, round(low * step, digits), round(high * step, digits), round(step, digits)
    )


def list_preferences(front: Front) -> dict[str, str]:
    """Return rule of `--pick` -> its name in the panel."""
    extremes = {
        f"{'max' if goal.direction == 'maximize' else 'min'} {goal.name}": name_extreme(goal)
        for goal in front.objectives
    }
    return {"knee": "knee (best compromise)", **extremes}


def build_choices(spec: SweepSpec, front: Front) -> dict[str, Any]:
    """Return what the page needs to choose as `--pick` does; values are unrounded means."""
    sliders = list_sliders(spec, front)
    return {
        "objectives": [{"name": g.name, "direction": g.direction} for g in front.objectives],
        "limits": [
            {
                "name": slider.name,
                "comparison": slider.comparison,
                "loosest": slider.loosest,
                # A merge has no costs of training.
                "merges": slider.name not in COST_METRICS,
            }
            for slider in sliders
        ],
        "members": [
            {
                "name": member.name,
                "values": {n: e.mean for n, e in member.mean.items() if math.isfinite(e.mean)},
                "keeps": grade_keeping(member, front.baselines, front.objectives),
            }
            for member in front.members
        ],
        "chosen": front.chosen.name if front.chosen else None,
    }
