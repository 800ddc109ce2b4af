"""Response surface of one objective over the searched parameters, with its uncertainty.

The surface is a Gaussian process whose kernel has a part for each parameter and one for each pair:

    k(x, x') = 1 + S + b / 2 * (S^2 - sum_i (a_i k_i)^2)    with S = sum_i a_i k_i(x_i, x_i')

`k_i` belongs to Legendre polynomials up to degree 3 of a number on its own scale, or to indicators
of names, scaled to a mean of 1. So `a_i` is the expected variance that parameter i alone gives, and
`b` scales that of pairs. A parameter without effect under the other values of a configuration
contributes nothing there. Noise has one variance, divided by the number of seeds. All these scales
are drawn from their posterior, so their own uncertainty counts.

Source: Duvenaud, Nickisch and Rasmussen 2011, Additive Gaussian processes; Goodman and Weare 2010,
Ensemble samplers with affine invariance.

Shapes: N configurations, D parameters, P features, W walkers, S draws, R points of the space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import legendre
from scipy.stats import qmc

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.core.trials import Params, ParamValue

DEGREE = 3
DECAY = 0.25
"""Expected variance of a degree over that of the degree below: surfaces are smooth."""
WALKERS, STEPS, BURN_IN, THIN = 48, 240, 120, 40
"""The ensemble: `WALKERS` draws are kept every `THIN` of the steps after `BURN_IN`."""
STRETCH = 2.0
PRIOR_MEANS = (math.log(0.05), 0.0, math.log(0.1))
PRIOR_SPREADS = (2.0, 1.0, 1.0)
LARGEST_SCALE = math.log(20)
"""Of the logarithms of each `a_i`, of `b`, and of the variance of the noise; objectives are
standardised."""
LEAST_NOISE = 1e-4
"""Share of the variance that noise has at least, for numerical stability."""
LARGE = 1e12
POINTS = 256
"""Points of the space over which variances are taken; a power of 2."""


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
        """Return the index of a choice; a number as -1 to 1 on its own scale.

        Raises:
            ValueError: the value lies outside of the domain.
        """
        if self.choices:
            return float(self.choices.index(value))
        low, high, number = self.low, self.high, float(value)
        if not low * (1 - 1e-9) <= number <= high * (1 + 1e-9):
            raise ValueError(f"{self.name} = {value} is not in {low} to {high}")
        if self.log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return 2 * (number - low) / (high - low) - 1

    def build_features(self, places: Floats) -> Floats:
        """Return features `[R, k]` of converted values; their squares sum to 1 in the mean."""
        if self.choices:
            count = len(self.choices)
            columns = (places[:, None] == np.arange(count)) - 1 / count
            return columns / math.sqrt(1 - 1 / count)
        degrees = np.arange(1, DEGREE + 1)
        shares = DECAY**degrees / (DECAY**degrees).sum()
        return legendre.legvander(places, DEGREE)[:, 1:] * np.sqrt((2 * degrees + 1) * shares)


class Encoder:
    """Features of configurations: those of each parameter, and of each pair."""

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        self.dimensions = tuple(dimensions)
        self._index = {dimension.name: i for i, dimension in enumerate(dimensions)}
        self.pairs = [(i, j) for i in range(len(dimensions)) for j in range(i)]

    def convert(self, params: Params) -> Floats:
        """Return a configuration as `[D]`.

        Raises:
            ValueError: a value lies outside of its domain.
            KeyError: a parameter has no value.
        """
        active: dict[str, bool] = {}
        row = np.zeros(len(self.dimensions))
        for i, dimension in enumerate(self.dimensions):
            when = dimension.when or {}
            active[dimension.name] = all(active[p] and params[p] in v for p, v in when.items())
            if active[dimension.name]:
                row[i] = dimension.convert(params[dimension.name])
        return row

    def find_active(self, places: Floats) -> Floats:
        """Return 1 where a parameter has an effect, else 0: `[R, D]`."""
        active = np.ones_like(places)
        for i, dimension in enumerate(self.dimensions):
            for parent, values in (dimension.when or {}).items():
                j = self._index[parent]
                kept = [self.dimensions[j].convert(value) for value in values]
                active[:, i] *= active[:, j] * np.isin(places[:, j], kept)
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

    def build_blocks(self, places: Floats) -> list[Floats]:
        """Return the features `[R, k]` of each parameter."""
        active = self.find_active(places)
        return [
            dimension.build_features(places[:, i]) * active[:, i, None]
            for i, dimension in enumerate(self.dimensions)
        ]

    def build_features(self, places: Floats) -> Floats:
        """Return all features, `[R, P]`: the constant, those of parameters, those of pairs."""
        blocks = self.build_blocks(places)
        products = [
            (blocks[i][:, :, None] * blocks[j][:, None, :]).reshape(len(places), -1)
            for i, j in self.pairs
        ]
        return np.hstack([np.ones((len(places), 1)), *blocks, *products])

    def spread_scales(self, scales: Floats, pair: float, sizes: Sequence[int]) -> Floats:
        """Return the prior variance of each feature's weight, `[P]`, from the scales `[D]`."""
        mains = [np.full(size, a) for size, a in zip(sizes, scales, strict=True)]
        products = [
            np.full(sizes[i] * sizes[j], pair * scales[i] * scales[j]) for i, j in self.pairs
        ]
        return np.concatenate([np.ones(1), *mains, *products])


@dataclass(frozen=True)
class Surfaces:
    """Draws of the surface of one objective, given what was measured."""

    weights: Floats
    """`[P, S]`, in the objective's own unit."""
    noise: Floats
    """Variance between seeds `[S]`, in the square of that unit."""


def draw_surfaces(
    encoder: Encoder, places: Floats, values: Floats, seeds: Floats, seed: int = 0
) -> Surfaces:
    """Draw surfaces from the posterior.

    Args:
        encoder: of the space.
        places: configurations, `[N, D]`.
        values: the objective, `[N]`, not all equal.
        seeds: trials that each value is the mean of, `[N]`.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    centre, unit = values.mean(), values.std()
    targets = (values - centre) / unit
    blocks = encoder.build_blocks(places)
    kernels = np.stack([block @ block.T for block in blocks])
    chain = _draw_scales(kernels, targets, seeds, rng)
    features = encoder.build_features(places)
    sizes = [block.shape[1] for block in blocks]
    columns = [
        _draw_weights(
            encoder.spread_scales(np.exp(row[:-2]), math.exp(row[-2]), sizes),
            features,
            targets,
            math.exp(row[-1]) / seeds,
            rng,
        )
        for row in chain
    ]
    return Surfaces(unit * np.stack(columns, axis=1), unit**2 * np.exp(chain[:, -1]))


def _draw_weights(
    prior: Floats, features: Floats, targets: Floats, noise: Floats, rng: np.random.Generator
) -> Floats:
    """Draw weights `[P]` from their posterior, by Matheron's rule."""
    weights = rng.standard_normal(len(prior)) * np.sqrt(prior)
    simulated = features @ weights + rng.standard_normal(len(noise)) * np.sqrt(noise)
    covariance = (features * prior) @ features.T + np.diag(noise)
    return weights + prior * (features.T @ np.linalg.solve(covariance, targets - simulated))


def _draw_scales(
    kernels: Floats, targets: Floats, seeds: Floats, rng: np.random.Generator
) -> Floats:
    """Draw the logarithms of all scales from their posterior, `[S, D + 2]`."""
    size = len(kernels) + 2
    means = np.array([*[PRIOR_MEANS[0]] * (size - 2), *PRIOR_MEANS[1:]])
    spreads = np.array([*[PRIOR_SPREADS[0]] * (size - 2), *PRIOR_SPREADS[1:]])
    walkers = means + spreads * rng.standard_normal((WALKERS, size))
    walkers = np.minimum(walkers, LARGEST_SCALE)
    count = len(targets)
    squares = kernels**2
    bordered = np.full((len(walkers), count + 1, count + 1), LARGE)

    def compute_log_density(rows: Floats) -> Floats:
        kept = np.exp(np.minimum(rows, LARGEST_SCALE))
        scales, pairs, noise = kept[:, :-2], kept[:, -2], kept[:, -1]
        sums = np.tensordot(scales, kernels, 1)
        own = np.tensordot(scales**2, squares, 1)
        covariance = 1 + sums + pairs[:, None, None] / 2 * (sums**2 - own)
        covariance += (LEAST_NOISE + noise)[:, None, None] * np.diag(1 / seeds)
        # The factor of a matrix bordered by the targets has the whitened targets as its last row.
        matrix = bordered[: len(rows)]
        matrix[:, :count, :count] = covariance
        matrix[:, count, :count] = targets
        lower = np.linalg.cholesky(matrix)
        diagonal = np.diagonal(lower, axis1=1, axis2=2)[:, :count]
        likelihood = -np.log(diagonal).sum(1) - 0.5 * (lower[:, count, :count] ** 2).sum(1)
        density = likelihood - 0.5 * (((rows - means) / spreads) ** 2).sum(1)
        return np.where((rows <= LARGEST_SCALE).all(1), density, -np.inf)

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
