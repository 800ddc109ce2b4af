"""Searched parameters of a space, as the analysis of their effects takes them."""

from __future__ import annotations

from gdpo_tune.analysis.response import Dimension
from gdpo_tune.core.trial_config import ParamValue
from gdpo_tune.spec.space import Choices, Space, Uniform, is_one_of


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
        found[name] = _build_dimension(name, domain, when)
    return tuple(found.values())


def _build_dimension(
    name: str, domain: Choices | Uniform, when: dict[str, tuple[ParamValue, ...]]
) -> Dimension:
    if isinstance(domain, Choices):
        return Dimension(name, domain.choices, when=when)
    return Dimension(name, (), float(domain.low), float(domain.high), domain.log, when)
