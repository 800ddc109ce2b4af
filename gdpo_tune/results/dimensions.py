"""Searched parameters of a space, as the analysis of their effects takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdpo_tune.analysis.effects import Effects, estimate_effects
from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.response import Dimension
from gdpo_tune.core.registry import SAMPLERS
from gdpo_tune.spec.gpu import choose_sampler
from gdpo_tune.spec.space import Choices, Space, is_one_of

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def estimate_sweep_effects(spec: SweepSpec, front: Front) -> Effects:
    """Estimate which parameters of a sweep mattered, as far as its sampler lets that be seen."""
    sampler = SAMPLERS[choose_sampler(spec).name]
    return estimate_effects(front, list_dimensions(spec.space), crowded=sampler.crowds)


def list_dimensions(space: Space) -> tuple[Dimension, ...]:
    """Return the parameters with more than one value, in dependency order.

    A condition on a fixed parameter holds always or never; in the latter case its parameter is left
    out.
    """
    found: dict[str, Dimension] = {}
    for name, domain in space.searched_domains.items():
        fixed = {p: v for p, v in domain.when.items() if p in space.fixed_values}
        missing = domain.when.keys() - fixed.keys() - found.keys()
        if missing or not all(is_one_of(space.fixed_values[p], v) for p, v in fixed.items()):
            continue
        when = {p: v for p, v in domain.when.items() if p not in fixed}
        if isinstance(domain, Choices):
            found[name] = Dimension(name, domain.choices, when=when)
        else:
            low, high = float(domain.low), float(domain.high)
            found[name] = Dimension(name, (), low, high, domain.log, when)
    return tuple(found.values())
