"""The first configurations of a sweep, before a sampler's model can propose any.

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

import numpy as np

from gdpo_tune.core import registry
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec import Choices, SweepSpec, Uniform
from gdpo_tune.spec.first_trials import list_spanning_weights

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
    # not at the top: this import takes a second, and refusing a spec needs no point
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
