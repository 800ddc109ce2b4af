"""The first configurations of a sweep, before a sampler's model can propose any.

Without merges they cover the space evenly. With merges they span it: a merge is about as good as
what lies between its parents, so the parents have to lie at the corners of what can be traded.
First all searched reward weights have the largest value of their range, which leaves least to the
anchor. The centre comes next, then each weight in turn, from the last one on, has its largest and
the others their least.

A merge moves less far from the initial policy than its parents did, and never further. So these
points have a learning rate near the upper end of its range. They have a normalization mode that
normalises every reward by itself, if one is searched: under a mode that sums rewards first, a
reward with a wide range outweighs any weight. Other parameters cover the space evenly.

Source: Rame et al. 2023, Rewarded soups, arXiv 2306.04488: one training for each reward.
docs/search.md compares designs.
"""

from __future__ import annotations

from gdpo_tune.core import registry
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec import Choices, Domain, SweepSpec, Uniform
from gdpo_tune.tuning.search.quasi_random import draw_point, map_share

WEIGHTS = "reward_weights."
RATE = "learning_rate"
MODE = "normalization"
UPPER_SHARE = 0.1
"""Upper part of the learning rate's range, on its own scale, from which corners take it."""
GOLDEN = 0.6180339887498949
"""Its multiples, without their whole parts, are spread evenly, however many there are."""


def draw_startup_point(spec: SweepSpec, index: int) -> dict[str, ParamValue]:
    """Draw start-up point `index`: a value for every dimension, without conditions.

    The same index gives the same point in every process.
    """
    point, spanning = draw_point(spec, index), list_spanning_weights(spec)
    if index >= len(spanning):
        return point
    domains = spec.space.searched_domains
    rate, modes = domains.get(RATE), domains.get(MODE)
    if isinstance(rate, Uniform):
        point[RATE] = map_share(rate, 1 - UPPER_SHARE * (index * GOLDEN % 1))
    if isinstance(modes, Choices):
        point[MODE] = next((m for m in modes.choices if is_separate(m)), point[MODE])
    return {**point, **spanning[index]}


def is_separate(mode: ParamValue) -> bool:
    """Return whether a normalization mode normalises every reward by itself."""
    info = registry.NORMALIZATIONS[str(mode)]
    return info.divides_by_group_std and not info.sums_first


def list_spanning_weights(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the reward weights of the first points: the corners, with the centre as second."""
    corners = list_corners(spec)
    centre = {n: spec.space.searched_domains[n].find_middle() for n in (corners or [{}])[0]}
    return [corners[0], centre, *corners[1:]] if corners else []


def list_corners(spec: SweepSpec) -> list[dict[str, ParamValue]]:
    """Return the corners of the searched reward weights; none without merges.

    Only ratios of weights matter. So without an anchor, a weight that is not searched, the largest
    of all are the centre and no corner.
    """
    weights = {n: d for n, d in spec.space.searched_domains.items() if n.startswith(WEIGHTS)}
    if not weights or not spec.has_candidates or not spec.search.merges.budget:
        return []
    ends = {name: find_ends(domain) for name, domain in weights.items()}
    least = {name: low for name, (low, _) in ends.items()}
    largest = {name: high for name, (_, high) in ends.items()}
    if len(ends) == 1:
        return [largest, least]
    singles = [{**least, name: high} for name, high in reversed(largest.items())]
    has_anchor = any(n.startswith(WEIGHTS) and n not in weights for n in spec.space.domains)
    return [largest, *singles] if has_anchor else singles


def find_ends(domain: Domain) -> tuple[ParamValue, ParamValue]:
    """Return the least and the largest value of a searched weight."""
    if isinstance(domain, Uniform):
        return domain.low, domain.high
    values = sorted(domain.list_values() or (), key=float)
    return values[0], values[-1]
