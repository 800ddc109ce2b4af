"""The first configurations of a sweep, before a sampler's model can propose any, and their lengths.

Without merges they cover the space evenly. With merges they span it: a merge is about as good as
what lies between its parents, so the parents have to lie at the corners of what can be traded.
First all searched reward weights have the largest value of their range. The centre comes next, then
each weight in turn, from the last one on, has its largest and the others their least.

A merge moves no further from the initial policy than its parents did. So these points have a
learning rate near the upper end of its range, and, if it is searched, a normalization mode that
normalises every reward by itself: else a reward with a wide range outweighs any weight.

Source: Rame et al. 2023, Rewarded soups, arXiv 2306.04488; docs/search.md compares designs.
"""

from __future__ import annotations

import math

from gdpo_tune.core import registry
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.model import GrowthSettings, SweepSpec
from gdpo_tune.spec.space import Choices, Uniform

WEIGHTS = "reward_weights."
UNKNOWN_BUDGET = 8
"""Part of the bound at which trainings first wait where the budget is not in completions."""
EVALUATED = 0.25
"""Largest share of a level's completions that its evaluation may cost."""
FIRST_POINTS = 4
"""Configurations that the plan `auto` begins with where none span what can be traded."""
RATE = "learning_rate"
MODE = "normalization"
UPPER_SHARE = 0.1
"""Upper part of the learning rate's range, on its own scale, from which corners take it."""
GOLDEN = 0.6180339887498949
"""Its multiples, without their whole parts, are spread evenly, however many there are."""


def draw_startup_point(spec: SweepSpec, index: int) -> dict[str, ParamValue]:
    """Draw start-up point `index`: a value for every dimension, without conditions."""
    point, spanning = draw_point(spec, index), list_spanning_weights(spec)
    if index >= len(spanning):
        return point
    domains = spec.space.searched_domains
    rate, modes = domains.get(RATE), domains.get(MODE)
    if isinstance(rate, Uniform):
        point[RATE] = map_share(rate, 1 - UPPER_SHARE * (index * GOLDEN % 1))
    if isinstance(modes, Choices):
        for mode in modes.choices:
            info = registry.NORMALIZATIONS[str(mode)]
            if info.divides_by_group_std and not info.sums_first:
                point[MODE] = mode
                break
    return {**point, **spanning[index]}


def draw_point(spec: SweepSpec, index: int) -> dict[str, ParamValue]:
    """Draw point `index` of the sweep's Sobol sequence, as `draw_startup_point`."""
    # not at the top: these take a second, and refusing a spec needs no point
    import numpy as np
    from scipy.stats import qmc

    domains = spec.space.searched_domains
    sequence = qmc.Sobol(len(domains), rng=np.random.default_rng(spec.search.seed))
    if index:
        sequence.fast_forward(index)
    shares = sequence.random(1)[0]
    return {
        name: map_share(domain, float(share))
        for (name, domain), share in zip(domains.items(), shares, strict=True)
    }


def map_share(domain: Choices | Uniform, share: float) -> ParamValue:
    """Return the value at `share` (from 0 to 1) of a domain, on the domain's own scale."""
    values = domain.list_values()
    if values is not None and not (isinstance(domain, Uniform) and domain.log):
        return values[min(len(values) - 1, int(share * len(values)))]
    assert isinstance(domain, Uniform)  # a choice always lists its values
    if not domain.log:
        return min(domain.high, domain.low + share * (domain.high - domain.low))
    if not domain.integer:  # rounding may lead past the end of the range
        return min(domain.high, domain.low * math.exp(share * math.log(domain.high / domain.low)))
    low, high = domain.low - 0.5, domain.high + 0.5  # so that each integer owns its rounding range
    return min(int(domain.high), max(int(domain.low), round(low * (high / low) ** share)))


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
