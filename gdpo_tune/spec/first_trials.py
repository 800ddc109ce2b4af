"""The trainings that a sweep begins with: the corners of its reward weights, and their lengths.

A merge lies between its parents, so the parents have to lie at the corners of what can be traded.
`tuning.startup` says with which other parameters they train.
"""

from __future__ import annotations

import math

from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.model import GrowthSettings, SweepSpec
from gdpo_tune.spec.space import Uniform

WEIGHTS = "reward_weights."
UNKNOWN_BUDGET = 8
"""Part of the bound at which trainings first wait where the budget is not in completions."""
EVALUATED = 0.25
"""Largest share of a level's completions that its evaluation may cost."""
FIRST_POINTS = 4
"""Configurations that the plan `auto` begins with where none span what can be traded."""


def list_spanning_weights(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the reward weights of the first points: the corners, with the centre as second."""
    corners = list_corners(spec)
    if not corners:
        return []
    centre = {name: spec.space.searched_domains[name].find_middle() for name in corners[0]}
    return [corners[0], centre, *corners[1:]]


def list_corners(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the corners of the searched reward weights; none without merges.

    If every one of several weights is searched, the point with all weights at their maximum is left
    out: only ratios matter.
    """
    weights = {n: d for n, d in spec.space.searched_domains.items() if n.startswith(WEIGHTS)}
    if not weights or not spec.has_candidates or not spec.search.merges.budget:
        return []
    least: dict[str, ParamValue] = {}
    largest: dict[str, ParamValue] = {}
    for name, domain in weights.items():
        if isinstance(domain, Uniform):
            least[name], largest[name] = domain.low, domain.high
        else:
            values = sorted(domain.choices, key=float)
            least[name], largest[name] = values[0], values[-1]
    if len(weights) == 1:
        return [largest, least]
    singles = [{**least, name: high} for name, high in reversed(largest.items())]
    has_anchor = any(n.startswith(WEIGHTS) and n not in weights for n in spec.space.domains)
    return [largest, *singles] if has_anchor else singles


def count_first_trials(spec: SweepSpec) -> int:
    """Count the trainings that the plan `auto` begins together, with the published setting.

    That one takes the place of the last spanning point: it lies inside of what can be traded, and
    so does what a model proposes once these have ended.
    """
    enqueued = len({tuple(sorted(point.items())) for point in spec.enqueue})
    return enqueued + (len(list_spanning_weights(spec)) or 1 + FIRST_POINTS)


def list_growth_levels(spec: SweepSpec) -> tuple[int, ...]:
    """Return the steps at which trainings of the plan `auto` wait, and last their bound.

    From each level to the next the steps double. At the first level the first configurations have
    cost at most `first_share` of a budget in completions; without one it is an eighth of the bound.
    No level is so short that its evaluation costs more than `EVALUATED` of its completions.
    """
    settings, training = spec.search.scheduler, spec.training
    assert isinstance(settings, GrowthSettings)
    budget = spec.search_completions / training.completions_per_step
    affordable = settings.first_share * budget / count_first_trials(spec)
    most = affordable if budget else training.steps / UNKNOWN_BUDGET
    evaluation = training.validation_completions / training.completions_per_step
    levels = [training.steps]
    while levels[0] > max(most, 1) and levels[0] / 2 * EVALUATED >= evaluation:
        levels.insert(0, math.ceil(levels[0] / 2))
    return tuple(levels)
