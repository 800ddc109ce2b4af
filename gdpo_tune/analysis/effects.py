"""Importance of each searched parameter for each objective, and the changes that it makes.

The importance of a parameter is its total Sobol index: the share of the variance between trials,
over the whole search space, that involves the parameter, alone or together with others. Shares may
sum to more than 1, because a share of two parameters together counts for both. The rest is noise.
Indices are those of draws of the response surface, see `response.py`: the estimate is their mean,
the interval their middle 95 %. Parameters that the search moved together share their effect, with
wide intervals.

`benchmarks/importance.py` compares this measure with others where the truth is known.

Source: Sobol 2001, Global sensitivity indices for nonlinear mathematical models; Jansen 1999.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.analysis.probability import Interval
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.resampling import compute_interval
from gdpo_tune.analysis.response import POINTS, Dimension, Encoder, draw_surfaces
from gdpo_tune.core.text import NOISE
from gdpo_tune.core.trials import Objective

Strength = Literal["clear", "unclear", "none"]

WIDE = 5.0
"""Ratio of the largest to the smallest value from which a figure has a log scale."""
NOISE_ALONE = 0.005
"""Importance that noise alone gives: a parameter without effect seldom has an interval above it."""
UNCLEAR = 0.1
"""Importance from which an effect that is not clear counts as unclear, not as undetectable."""
GAP = 0.2
"""Importances that differ by less count as equal when rankings are compared."""
RELIABLE, RELIABLE_CROWDED = 0.85, 0.9
"""Probability of the ranking from which importances are shown; the second for crowded trials."""
LEAST, LEAST_EACH = 10, 3
"""Configurations that are needed: `LEAST` and `LEAST_EACH` for each parameter."""
LEAST_CROWDED = 80
"""Configurations that are needed where the sampler crowds its proposals."""
MOST = 80
"""Configurations that a surface is fitted to; of more, an even selection."""


@dataclass(frozen=True)
class Change:
    """The mean change of an objective when one parameter moves and the others stay."""

    before: str
    """Value that the parameter moves from: the smallest, or the first name."""
    after: str
    difference: float
    interval: Interval


@dataclass(frozen=True)
class ParameterEffect:
    """The effect of one parameter on one objective."""

    parameter: str
    objective: str
    importance: float
    """Total Sobol index, 0 to 1, as a share of the variance with noise."""
    interval: Interval
    changes: tuple[Change, ...]
    """For numbers one change, from the smallest to the largest; for names a change from the first
    to each other one."""

    @property
    def strength(self) -> Strength:
        """Return `clear` if the whole interval lies above what noise alone gives."""
        if self.interval.low > NOISE_ALONE:
            return "clear"
        return "unclear" if self.importance >= UNCLEAR else "none"


@dataclass(frozen=True)
class Effects:
    """Effects of every parameter, for the objectives whose ranking is reliable."""

    estimates: tuple[ParameterEffect, ...]
    """Empty if there are too few configurations."""
    unreliable: tuple[str, ...]
    """Objectives that are left out, because the data do not determine a ranking."""
    configurations: int
    needed: int
    """Configurations from which importance may be shown."""
    constant: tuple[str, ...] = ()
    """Objectives with one value in all configurations, of which there are several."""


def estimate_effects(
    front: Front, dimensions: Sequence[Dimension], *, crowded: bool = False
) -> Effects:
    """Estimate the effects of the searched parameters on every objective.

    `crowded`: the sampler crowds its proposals, so more of them are needed for a right ranking.
    Baselines, checkpoints and merges have no parameters that led to them and do not count. Nor do
    members of a population that took values from others, and values outside of the space.
    """
    encoder = Encoder(dimensions)
    needed = LEAST + LEAST_EACH * len(dimensions)
    if crowded:
        needed = max(needed, LEAST_CROWDED)
    reliable = RELIABLE_CROWDED if crowded else RELIABLE
    rows = _list_rows(front, encoder)
    values = {g.name: [c.mean[g.name].mean for _, c in rows] for g in front.objectives}
    constant = tuple(name for name, of in values.items() if len(of) > 1 and _is_constant(of))
    if len(rows) < needed or not dimensions:
        return Effects((), (), len(rows), needed, constant)
    chosen = [rows[i] for i in np.linspace(0, len(rows) - 1, min(MOST, len(rows))).astype(int)]
    effects: list[ParameterEffect] = []
    unreliable: list[str] = []
    for goal in front.objectives:
        if goal.name not in constant:
            found = _estimate_objective(encoder, chosen, goal, reliable)
            effects += found
            unreliable += [] if found else [goal.name]
    return Effects(tuple(effects), tuple(unreliable), len(rows), needed, constant)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether values spread over a factor of `WIDE`, all above 0."""
    return min(values) > 0 and max(values) / min(values) >= WIDE


def _is_constant(values: ArrayLike) -> bool:
    return bool(np.ptp(values) <= NOISE * np.max(np.abs(values)))


def _list_rows(front: Front, encoder: Encoder) -> list[tuple[Floats, Configuration]]:
    moved = {record.number for record in front.records if record.lineage}
    rows: list[tuple[Floats, Configuration]] = []
    for configuration in front.configurations:
        if not configuration.is_training or configuration.first in moved:
            continue
        try:
            rows.append((encoder.convert(configuration.params), configuration))
        except (KeyError, ValueError):  # the published weights may lie outside of the space
            continue
    return rows


def _estimate_objective(
    encoder: Encoder, rows: Sequence[tuple[Floats, Configuration]], goal: Objective, reliable: float
) -> list[ParameterEffect]:
    """Estimate the effects on one objective; nothing if their ranking is not `reliable`."""
    values = np.array([configuration.mean[goal.name].mean for _, configuration in rows])
    seeds = np.array([float(configuration.seeds) for _, configuration in rows])
    places = np.stack([place for place, _ in rows])
    if _is_constant(values):
        return []
    surfaces = draw_surfaces(encoder, places, values, seeds)
    shares = compute_total_indices(encoder, surfaces.weights, surfaces.noise)
    if compute_reliability(shares) < reliable:
        return []
    means = shares.mean(axis=1)
    return [
        ParameterEffect(
            dimension.name,
            goal.name,
            float(means[i]),
            compute_interval(shares[i]),
            _list_changes(encoder, i, surfaces.weights),
        )
        for i, dimension in enumerate(encoder.dimensions)
    ]


def compute_total_indices(encoder: Encoder, weights: Floats, noise: Floats) -> Floats:
    """Return the total Sobol index of each parameter in each drawn surface, `[D, S]`.

    Args:
        encoder: of the space.
        weights: of the surfaces' features, `[P, S]`.
        noise: variance of a trial, `[S]`.
    """
    size = len(encoder.dimensions)
    points = encoder.draw_points(POINTS)
    left, right = points[:, :size], points[:, size:]
    values = encoder.build_features(left) @ weights
    total = values.var(axis=0) + noise
    shares = np.empty((size, weights.shape[1]))
    for i in range(size):
        moved = left.copy()
        moved[:, i] = right[:, i]
        change = values - encoder.build_features(moved) @ weights
        shares[i] = (change**2).mean(axis=0) / 2 / total
    return np.minimum(shares, 1.0)


def ranks_agree(truth: Floats, shown: Floats) -> bool:
    """Return whether no parameter is shown above one whose true importance is `GAP` larger."""
    larger = truth[:, None] - truth[None, :] >= GAP
    return bool((shown[:, None] > shown[None, :])[larger].all())


def compute_reliability(shares: Floats) -> float:
    """Return the probability that the ranking by the means of `shares` `[D, S]` agrees."""
    means = shares.mean(axis=1)
    return float(np.mean([ranks_agree(draw, means) for draw in shares.T]))


def _list_changes(encoder: Encoder, index: int, weights: Floats) -> tuple[Change, ...]:
    dimension = encoder.dimensions[index]
    places = encoder.draw_points(POINTS)[:, : len(encoder.dimensions)]
    places = places[encoder.find_active(places)[:, index] > 0]
    if not len(places):
        return ()
    values = dimension.choices or (dimension.low, dimension.high)
    means: list[Floats] = []
    for value in values:
        places[:, index] = dimension.convert(value)
        means.append(encoder.build_features(places).mean(axis=0) @ weights)
    names = [str(v) if dimension.choices else f"{v:.3g}" for v in values]
    return tuple(
        Change(names[0], name, float((mean - means[0]).mean()), compute_interval(mean - means[0]))
        for name, mean in zip(names[1:], means[1:], strict=True)
    )
