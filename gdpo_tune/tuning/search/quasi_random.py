"""Points of a scrambled Sobol sequence, for the start-up of samplers.

They cover a space of a few dimensions more evenly than uniform draws do. That includes choices,
which Optuna's own quasi-random sampler draws uniformly.
"""

from __future__ import annotations

import math

import numpy as np

from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec import Choices, SweepSpec, Uniform


def draw_point(spec: SweepSpec, index: int) -> dict[str, ParamValue]:
    """Draw point `index` of the sweep's sequence: a value for every dimension, without conditions.

    The same index gives the same point in every process.
    """
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
