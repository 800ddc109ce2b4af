"""Importance of each searched parameter for each objective, and the changes that it makes.

The importance of a parameter is its total Sobol index: the share of the variance between trials,
over the whole search space, that involves the parameter, alone or together with others. Shares may
sum to more than 1, because a share of two parameters together counts for both. The rest is noise.
Indices are those of draws of the response surface, see `sample_surfaces`: the estimate is their
mean, the interval their middle 95 %. Parameters that the search moved together share their effect,
with wide intervals.

`benchmarks/importance.py` compares this measure with others where the truth is known.

Source: Sobol 2001, Global sensitivity indices for nonlinear mathematical models; Jansen 1999.

Shapes: N configurations, D parameters, P features, W walkers, S draws, R points of the space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.polynomial import legendre
from numpy.typing import ArrayLike
from scipy.stats import qmc

from gdpo_tune.analysis.front import Front, name_extreme
from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.uncertainty import Interval, compute_interval, format_share
from gdpo_tune.core.text import (
    NOISE,
    format_count,
    format_estimate,
    format_hypervolume,
    format_list,
)
from gdpo_tune.core.trials import Params, ParamValue, title_candidate

Strength = Literal["clear", "unclear", "none"]

WIDE = 5.0
"""Ratio of the largest to the smallest value from which a figure has a log scale."""
NOISE_ALONE = 0.005
"""Importance that noise alone gives: a parameter without effect seldom has an interval above it."""
UNCLEAR = 0.1
"""Importance from which an effect that is not clear counts as unclear, not as undetectable."""
RANK_TOLERANCE = 0.2
"""Importances that differ by less count as equal when rankings are compared."""
RELIABLE, RELIABLE_CROWDED = 0.85, 0.9
"""Probability of the ranking from which importances are shown; the second for crowded trials."""
MIN_CONFIGURATIONS, MIN_EACH = 10, 3
"""Configurations that are needed: `MIN_CONFIGURATIONS` and `MIN_EACH` for each parameter."""
MIN_CROWDED = 80
"""Configurations that are needed where the sampler crowds its proposals."""
MAX_CONFIGURATIONS = 80
"""Configurations that a surface is fitted to; of more, an even selection."""
DEGREE = 3
DECAY = 0.25
"""Expected variance of a degree over that of the degree below: surfaces are smooth."""
WALKERS, STEPS, BURN_IN, THIN = 48, 240, 120, 40
"""The ensemble: `WALKERS` draws are kept every `THIN` of the steps after `BURN_IN`."""
STRETCH = 2.0
PRIOR_MEANS = (math.log(0.05), 0.0, math.log(0.1))
PRIOR_SPREADS = (2.0, 1.0, 1.0)
MAX_SCALE = math.log(20)
"""Of the logarithms of each `a_i`, of `b`, and of the variance of the noise; objectives are
standardised."""
MIN_NOISE = 1e-4
"""Share of the variance that noise has at least, for numerical stability."""
LARGE = 1e12
POINTS = 256
"""Points of the space over which variances are taken; a power of 2."""
MORE = 2
"""Factor by which more configurations may settle a ranking that is not reliable."""
MAX_EFFECTS = 6
"""Effects that get a sentence: the most important ones."""


class Change(NamedTuple):
    """The mean change of an objective when one parameter moves and the others stay."""

    before: str
    """The smallest value, or the first name."""
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
    Only trainings in the space count.
    """
    encoder = Encoder(dimensions)
    needed = MIN_CONFIGURATIONS + MIN_EACH * len(dimensions)
    if crowded:
        needed = max(needed, MIN_CROWDED)
    reliable = RELIABLE_CROWDED if crowded else RELIABLE
    rows: list[tuple[Floats, Configuration]] = []
    for configuration in front.configurations:
        if configuration.is_training:
            with suppress(KeyError, ValueError):  # the published weights may lie outside
                rows.append((encoder.convert(configuration.params), configuration))
    values = {g.name: [c.mean[g.name].mean for _, c in rows] for g in front.objectives}
    constant = tuple(name for name, of in values.items() if len(of) > 1 and _is_constant(of))
    if len(rows) < needed or not dimensions:
        return Effects((), (), len(rows), needed, constant)
    most = min(MAX_CONFIGURATIONS, len(rows))
    chosen = [rows[i] for i in np.linspace(0, len(rows) - 1, most).astype(int)]
    coordinates = np.stack([place for place, _ in chosen])
    seeds = np.array([float(configuration.seeds) for _, configuration in chosen])
    effects: list[ParameterEffect] = []
    unreliable: list[str] = []
    for goal in front.objectives:
        if goal.name in constant:
            continue
        targets = np.array([configuration.mean[goal.name].mean for _, configuration in chosen])
        if not _is_constant(targets):
            weights, noise = sample_surfaces(encoder, coordinates, targets, seeds)
            shares = compute_total_indices(encoder, weights, noise)
            if compute_reliability(shares) >= reliable:
                for i, mean in enumerate(shares.mean(axis=1)):
                    name, interval = dimensions[i].name, compute_interval(shares[i])
                    changes = _list_changes(encoder, i, weights)
                    effects.append(ParameterEffect(name, goal.name, float(mean), interval, changes))
                continue
        unreliable.append(goal.name)
    return Effects(tuple(effects), tuple(unreliable), len(rows), needed, constant)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether values spread over a factor of `WIDE`, all above 0."""
    return min(values) > 0 and max(values) / min(values) >= WIDE


def _is_constant(values: ArrayLike) -> bool:
    return bool(np.ptp(values) <= NOISE * np.max(np.abs(values)))


def compute_total_indices(encoder: Encoder, weights: Floats, noise: Floats) -> Floats:
    """Return the total Sobol index of each parameter in each surface of `Surfaces`, `[D, S]`."""
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
    """Return False if a parameter stands above one that is truly `RANK_TOLERANCE` larger."""
    larger = truth[:, None] - truth[None, :] >= RANK_TOLERANCE
    return bool((shown[:, None] > shown[None, :])[larger].all())


def compute_reliability(shares: Floats) -> float:
    """Return the probability that the ranking by the means of `shares` `[D, S]` agrees."""
    means = shares.mean(axis=1)
    return float(np.mean([ranks_agree(draw, means) for draw in shares.T]))


def _list_changes(encoder: Encoder, index: int, weights: Floats) -> tuple[Change, ...]:
    dimension = encoder.dimensions[index]
    coordinates = encoder.draw_points(POINTS)[:, : len(encoder.dimensions)]
    coordinates = coordinates[encoder.find_active(coordinates)[:, index] > 0]
    if not len(coordinates):
        return ()
    values = dimension.choices or (dimension.low, dimension.high)
    means: list[Floats] = []
    for value in values:
        coordinates[:, index] = dimension.convert(value)
        means.append(encoder.build_features(coordinates).mean(axis=0) @ weights)
    names = [str(v) if dimension.choices else f"{v:.3g}" for v in values]
    return tuple(
        Change(names[0], name, float((mean - means[0]).mean()), compute_interval(mean - means[0]))
        for name, mean in zip(names[1:], means[1:], strict=True)
    )


@dataclass(frozen=True)
class Dimension:
    """One searched parameter and its domain."""

    name: str
    choices: tuple[ParamValue, ...] = ()
    """Empty: a number from `low` to `high`."""
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    when: Mapping[str, tuple[ParamValue, ...]] | None = None
    """Searched parameters and their values under which this one has an effect; None: always."""

    def convert(self, value: ParamValue) -> float:
        """Return the index of a choice; a number as -1 to 1; a ValueError if it lies outside."""
        if self.choices:
            return float(self.choices.index(value))
        low, high, number = self.low, self.high, float(value)
        if not low * (1 - 1e-9) <= number <= high * (1 + 1e-9):
            raise ValueError(f"{self.name} = {value} is not in {low} to {high}")
        if self.log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return 2 * (number - low) / (high - low) - 1

    def build_features(self, coordinates: Floats) -> Floats:
        """Return features `[R, k]` of converted values; their squares sum to 1 in the mean."""
        if self.choices:
            count = len(self.choices)
            columns = (coordinates[:, None] == np.arange(count)) - 1 / count
            return columns / math.sqrt(1 - 1 / count)
        degrees = np.arange(1, DEGREE + 1)
        shares = DECAY**degrees / (DECAY**degrees).sum()
        return legendre.legvander(coordinates, DEGREE)[:, 1:] * np.sqrt((2 * degrees + 1) * shares)


class Encoder:
    """Features of configurations: those of each parameter, and of each pair."""

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        self.dimensions = tuple(dimensions)
        self._index = {dimension.name: i for i, dimension in enumerate(dimensions)}
        self.pairs = [(i, j) for i in range(len(dimensions)) for j in range(i)]

    def convert(self, params: Params) -> Floats:
        """Return a configuration as `[D]`; a missing value is a KeyError, another a ValueError."""
        active: dict[str, bool] = {}
        row = np.zeros(len(self.dimensions))
        for i, dimension in enumerate(self.dimensions):
            when = dimension.when or {}
            active[dimension.name] = all(active[p] and params[p] in v for p, v in when.items())
            if active[dimension.name]:
                row[i] = dimension.convert(params[dimension.name])
        return row

    def find_active(self, coordinates: Floats) -> Floats:
        """Return 1 where a parameter has an effect, else 0: `[R, D]`."""
        active = np.ones_like(coordinates)
        for i, dimension in enumerate(self.dimensions):
            for parent, values in (dimension.when or {}).items():
                j = self._index[parent]
                kept = [self.dimensions[j].convert(value) for value in values]
                active[:, i] *= active[:, j] * np.isin(coordinates[:, j], kept)
        return active

    def draw_points(self, count: int) -> Floats:
        """Return quasi-random points of the space, `[R, 2 D]`: two independent ones a row."""
        size = len(self.dimensions)
        units = qmc.Sobol(2 * size, rng=np.random.default_rng(0)).random(count)
        for column, dimension in enumerate(self.dimensions * 2):
            choices = len(dimension.choices)
            unit = units[:, column]
            units[:, column] = np.floor(unit * choices) if choices else 2 * unit - 1
        return units

    def build_blocks(self, coordinates: Floats) -> list[Floats]:
        """Return the features `[R, k]` of each parameter."""
        active = self.find_active(coordinates)
        return [
            dimension.build_features(coordinates[:, i]) * active[:, i, None]
            for i, dimension in enumerate(self.dimensions)
        ]

    def build_features(self, coordinates: Floats) -> Floats:
        """Return all features, `[R, P]`: the constant, those of parameters, those of pairs."""
        blocks = self.build_blocks(coordinates)
        products = [
            (blocks[i][:, :, None] * blocks[j][:, None, :]).reshape(len(coordinates), -1)
            for i, j in self.pairs
        ]
        return np.hstack([np.ones((len(coordinates), 1)), *blocks, *products])


class Surfaces(NamedTuple):
    """Draws of the surface of one objective, given what was measured."""

    weights: Floats
    """`[P, S]`, in the objective's own unit."""
    noise: Floats
    """Variance between seeds `[S]`, in the square of that unit."""


def sample_surfaces(
    encoder: Encoder, coordinates: Floats, values: Floats, seeds: Floats
) -> Surfaces:
    """Draw surfaces from the posterior of a Gaussian process.

    Its kernel has a part for each parameter and one for each pair:

        k(x, x') = 1 + S + b / 2 * (S^2 - sum_i (a_i k_i)^2)    with S = sum_i a_i k_i(x_i, x_i')

    `k_i` belongs to Legendre polynomials up to degree 3 of a number on its own scale, or to
    indicators of names, scaled to a mean of 1. So `a_i` is the expected variance that parameter i
    alone gives, and `b` scales that of pairs. A parameter without effect under the other values of
    a configuration contributes nothing there. Noise has one variance, divided by the number of
    seeds. All these scales are drawn from their posterior, so their own uncertainty counts.

    Source: Duvenaud, Nickisch and Rasmussen 2011, Additive Gaussian processes; Goodman and Weare
    2010, Ensemble samplers with affine invariance.

    Args:
        encoder: features of the space.
        coordinates: configurations, `[N, D]`.
        values: the objective, `[N]`, not all equal.
        seeds: trials that each value is the mean of, `[N]`.
    """
    rng = np.random.default_rng(0)
    centre, unit = values.mean(), values.std()
    targets = (values - centre) / unit
    blocks = encoder.build_blocks(coordinates)
    kernels = np.stack([block @ block.T for block in blocks])
    chain = _draw_scales(kernels, targets, seeds, rng)
    features = encoder.build_features(coordinates)
    sizes = [block.shape[1] for block in blocks]
    columns: list[Floats] = []
    for row in chain:  # weights from their posterior, by Matheron's rule
        scales, pair, noise = np.exp(row[:-2]), math.exp(row[-2]), math.exp(row[-1]) / seeds
        mains = [np.full(size, a) for size, a in zip(sizes, scales, strict=True)]
        products = [
            np.full(sizes[i] * sizes[j], pair * scales[i] * scales[j]) for i, j in encoder.pairs
        ]
        prior = np.concatenate([np.ones(1), *mains, *products])  # variance of each weight
        weights = rng.standard_normal(len(prior)) * np.sqrt(prior)
        simulated = features @ weights + rng.standard_normal(len(noise)) * np.sqrt(noise)
        covariance = (features * prior) @ features.T + np.diag(noise)
        rest = np.linalg.solve(covariance, targets - simulated)
        columns.append(weights + prior * (features.T @ rest))
    return Surfaces(unit * np.stack(columns, axis=1), unit**2 * np.exp(chain[:, -1]))


def _draw_scales(
    kernels: Floats, targets: Floats, seeds: Floats, rng: np.random.Generator
) -> Floats:
    """Draw the logarithms of all scales from their posterior, `[S, D + 2]`."""
    size = len(kernels) + 2
    means = np.array([*[PRIOR_MEANS[0]] * (size - 2), *PRIOR_MEANS[1:]])
    spreads = np.array([*[PRIOR_SPREADS[0]] * (size - 2), *PRIOR_SPREADS[1:]])
    walkers = means + spreads * rng.standard_normal((WALKERS, size))
    walkers = np.minimum(walkers, MAX_SCALE)
    count = len(targets)
    squares = kernels**2
    bordered = np.full((len(walkers), count + 1, count + 1), LARGE)

    def compute_log_density(rows: Floats) -> Floats:
        kept = np.exp(np.minimum(rows, MAX_SCALE))
        scales, pairs, noise = kept[:, :-2], kept[:, -2], kept[:, -1]
        sums = np.tensordot(scales, kernels, 1)
        own = np.tensordot(scales**2, squares, 1)
        covariance = 1 + sums + pairs[:, None, None] / 2 * (sums**2 - own)
        covariance += (MIN_NOISE + noise)[:, None, None] * np.diag(1 / seeds)
        # The factor of a matrix bordered by the targets has the whitened targets as its last row.
        matrix = bordered[: len(rows)]
        matrix[:, :count, :count] = covariance
        matrix[:, count, :count] = targets
        lower = np.linalg.cholesky(matrix)
        diagonal = np.diagonal(lower, axis1=1, axis2=2)[:, :count]
        likelihood = -np.log(diagonal).sum(1) - 0.5 * (lower[:, count, :count] ** 2).sum(1)
        density = likelihood - 0.5 * (((rows - means) / spreads) ** 2).sum(1)
        return np.where((rows <= MAX_SCALE).all(1), density, -np.inf)

    density = compute_log_density(walkers)
    kept: list[Floats] = []
    half = WALKERS // 2
    for step in range(1, STEPS + 1):
        for mine, other in ((slice(0, half), slice(half, None)), (slice(half, None), slice(half))):
            # A factor with density proportional to 1 / sqrt(z) between 1 / STRETCH and STRETCH.
            factor = (1 + (STRETCH - 1) * rng.random(half)) ** 2 / STRETCH
            partner = walkers[other][rng.integers(half, size=half)]
            proposed = partner + factor[:, None] * (walkers[mine] - partner)
            proposed_density = compute_log_density(proposed)
            gain = (size - 1) * np.log(factor) + proposed_density - density[mine]
            accepted = np.log(rng.random(half)) < gain
            walkers[mine] = np.where(accepted[:, None], proposed, walkers[mine])
            density[mine] = np.where(accepted, proposed_density, density[mine])
        if step > BURN_IN and step % THIN == 0:
            kept.append(walkers.copy())
    return np.concatenate(kept)


def describe_findings(front: Front, effects: Effects) -> tuple[list[str], list[str]]:
    """Return sentences on which parameters mattered, and on the limits of the data."""
    lines: list[str] = []
    if front.members:
        volume = format_hypervolume(front.hypervolume, front.hypervolume_interval)
        members = format_count(len(front.members), "configuration")
        lines.append(f"The front has {members} and a hypervolume of {volume}.")
    for goal in front.objectives:
        if goal.name in front.extremes and not front.list_ties(goal.name):
            best = front.extremes[goal.name]
            title = title_candidate(best.name)
            lines.append(
                f"{title[0].upper()}{title[1:]} has the {name_extreme(goal)}, "
                f"{format_estimate(best.mean[goal.name])}. No other configuration is tied with it."
            )
    clear = [effect for effect in effects.estimates if effect.strength == "clear"]
    clear.sort(key=lambda effect: -effect.importance)
    lines += [describe_effect(effect) for effect in clear[:MAX_EFFECTS]]
    if len(clear) > MAX_EFFECTS:
        lines.append(
            f"Weaker effects: {len(clear) - MAX_EFFECTS} more in the figure of importance."
        )
    return lines, _list_limits(front, effects)


def _list_limits(front: Front, effects: Effects) -> list[str]:
    lines = _list_limits_of_effects(effects)
    stopped = sum(record.state == "pruned" and record.is_training for record in front.records)
    if effects.estimates and stopped:
        lines.append(
            f"Stopped early, without a value on test prompts: {format_count(stopped, 'trial')}. "
            "Effects are estimated from the trials that ran to the end; over all trials they may "
            "be larger."
        )
    provisional = sum(member.is_provisional for member in front.members)
    if provisional:
        lines.append(
            f"Provisional, with only one seed: {provisional} of the "
            f"{format_count(len(front.members), 'configuration')} on the front."
        )
    doubtful = [member.name for member in front.members if member.probability < 0.5]
    if doubtful:
        lines.append(
            "More likely dominated than not, given the standard errors: "
            f"{format_list([title_candidate(name) for name in doubtful])}."
        )
    varied = [name for name in front.extremes if name not in effects.constant]
    tied = [name for name in varied if front.list_ties(name)]
    if tied:
        lines.append(f"Top configurations for {format_list(tied)} are statistically tied.")
    return lines


def _list_limits_of_effects(effects: Effects) -> list[str]:
    lines: list[str] = []
    if effects.configurations < effects.needed:
        lines.append(
            "Too few configurations to say which parameters mattered: it takes "
            f"{effects.needed} that were trained to the end, and this sweep has "
            f"{effects.configurations} (search.trials)."
        )
    if effects.unreliable:
        lines.append(
            "Too few configurations to say which parameters mattered for "
            f"{format_list(effects.unreliable)}: {effects.configurations} do not settle their "
            f"order, about {MORE * effects.configurations} would (search.trials)."
        )
    if effects.constant:
        lines.append(
            f"Did not vary: {format_list(effects.constant)}. All {effects.configurations} "
            "configurations have the same value, so no parameter mattered."
        )
    for effect in effects.estimates:
        if effect.strength == "unclear":
            share = format_share(effect.importance, effect.interval)
            lines.append(
                f"Unclear: {effect.parameter} may explain {share} of the variance in "
                f"{effect.objective}."
            )
    names = list(dict.fromkeys(effect.parameter for effect in effects.estimates))
    silent = [
        name
        for name in names
        if all(e.strength == "none" for e in effects.estimates if e.parameter == name)
    ]
    if silent:
        lines.append(
            f"No detectable effect: {format_list(silent)}. The intervals include what noise alone "
            "gives; the figure of importance shows how large an effect can still be."
        )
    return lines


def describe_effect(effect: ParameterEffect) -> str:
    """Return a sentence on a clear effect: its share of the variance, and its changes."""
    share = format_share(effect.importance, effect.interval)
    share = f"{effect.parameter} explains {share} of the variance in {effect.objective}"
    changes: list[str] = []
    for before, after, difference, interval in effect.changes:
        if interval.low > 0 or interval.high < 0:
            word = "raises" if difference > 0 else "lowers"
            low, high = sorted(map(abs, interval))
            changes.append(
                f"going from {before} to {after} {word} it by {abs(difference):.3g} "
                f"({low:.2g} to {high:.2g})"
            )
    if not changes:
        return f"{share}, by a curve or together with other parameters."
    return f"{share}: {'; '.join(changes)}."
