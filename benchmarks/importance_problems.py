"""Problems of `importance.py`: sweeps whose parameters have known importances.

An objective is a sum of terms, each the product of one standardised shape for each of its
parameters. Shares of the variance are random, and at least one parameter has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.response import Dimension, Encoder
from gdpo_tune.core.trials import Estimate, Params, TrialRecord
from gdpo_tune.results.dimensions import list_dimensions
from gdpo_tune.spec import Choices, Domain, ObjectiveSpec, Search, Space, SweepSpec, Uniform
from gdpo_tune.tuning.search.projection import Projection

Floats = NDArray[np.float64]
Shape = Callable[[Floats], Floats]

KINDS = ("additive", "interacting", "conditional")
GOALS = ("correctness", "length")
CENTRE, DEVIATION = 0.5, 0.12
"""Mean and standard deviation of an objective over the space."""
NOISE_SHARES = (0.02, 0.1)
"""Share of the variance of a trial that is noise; 2 to 10 % in a finished sweep of `code.yaml`."""
PAIRS = 3
PAIR_SHARES = (0.3, 0.6)
"""Share of the variance that comes from pairs of parameters, where they interact."""
POINTS = 4096
"""Points of the space for the true importances."""
PLAIN: dict[str, Domain] = {
    "normalization": Choices(choices=("gdpo", "grpo", "grpo_no_std")),
    "group_size": Choices(choices=(4, 8)),
    "reward_weights.format": Uniform(low=0.05, high=2.0, log=True),
    "reward_weights.length": Uniform(low=0.05, high=2.0, log=True),
    "learning_rate": Uniform(low=3e-5, high=3e-4, log=True),
    "temperature": Uniform(low=0.7, high=1.1),
}
CONDITIONAL: dict[str, Domain] = {
    "normalization": Choices(choices=("gdpo", "grpo")),
    "gamma": Uniform(low=0.0, high=1.0, when={"normalization": ("gdpo",)}),
    "length_shape": Choices(choices=("step", "overlong")),
    "length_cache": Uniform(low=0.05, high=1.0, when={"length_shape": ("overlong",)}),
    "reward_weights.length": Uniform(low=0.05, high=2.0, log=True),
    "learning_rate": Uniform(low=3e-5, high=3e-4, log=True),
}


@dataclass(frozen=True)
class Term:
    """A part of an objective."""

    parameters: tuple[int, ...]
    shapes: tuple[Shape, ...]
    share: float
    """Of the variance."""


@dataclass(frozen=True)
class Surface:
    """One objective over the space."""

    encoder: Encoder
    terms: tuple[Term, ...]
    parts: Floats
    """Share of the space in which each parameter acts, `[D]`."""

    def compute(self, places: Floats) -> Floats:
        """Return the objective at places `[R, D]`, without noise, before it is scaled."""
        active = self.encoder.find_active(places) > 0
        total = np.zeros(len(places))
        for term in self.terms:
            value = np.full(len(places), math.sqrt(term.share))
            for i, shape in zip(term.parameters, term.shapes, strict=True):
                value *= np.where(active[:, i], shape(places[:, i]), 0) / math.sqrt(self.parts[i])
            total += value
        return total


@dataclass(frozen=True)
class Case:
    """A simulated sweep, and the true importance of each parameter for each objective."""

    kind: str
    spec: SweepSpec
    records: tuple[TrialRecord, ...]
    truth: dict[str, dict[str, float]]
    """Objective -> parameter -> share of the variance of a trial: its total Sobol index."""


def simulate_case(kind: str, seed: int, trials: int, sampler: str = "auto") -> Case:
    """Simulate a sweep on a random problem of a kind."""
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    spec = SweepSpec(
        name=kind,
        task="simulated",
        policy="simulated",
        objectives={n: ObjectiveSpec(direction="maximize", reference=0.0) for n in GOALS},
        space=Space(domains=CONDITIONAL if kind == "conditional" else PLAIN),
        search=Search(trials=trials, sampler=sampler, seed=seed),
    )
    encoder = Encoder(list_dimensions(spec.space))
    noise = float(rng.uniform(*NOISE_SHARES))
    points = encoder.draw_points(POINTS)
    parts = encoder.find_active(points[:, : len(encoder.dimensions)]).mean(axis=0)
    worth: dict[str, Callable[[Params], float]] = {}
    truth: dict[str, dict[str, float]] = {}
    for goal in GOALS:
        surface = Surface(encoder, _draw_terms(kind, encoder.dimensions, rng), parts)
        worth[goal], shares = _scale(surface, points)
        truth[goal] = {name: (1 - noise) * share for name, share in shares.items()}
    deviation = DEVIATION * math.sqrt(noise / (1 - noise))
    return Case(kind, spec, _run_sweep(spec, worth, deviation, rng), truth)


def _draw_terms(
    kind: str, dimensions: Sequence[Dimension], rng: np.random.Generator
) -> tuple[Term, ...]:
    count = len(dimensions)
    acting = rng.permutation(count)[: count - int(rng.integers(1, 3))]
    wanted = PAIRS if kind == "interacting" else 0
    pairs = [tuple(int(i) for i in rng.choice(acting, 2, replace=False)) for _ in range(wanted)]
    crossed = float(rng.uniform(*PAIR_SHARES)) if pairs else 0.0
    mains = rng.dirichlet(np.full(len(acting), 0.8)) * (1 - crossed)
    products = rng.dirichlet(np.ones(len(pairs))) * crossed if pairs else ()
    members = [*((int(i),) for i in acting), *pairs]
    return tuple(
        Term(term, tuple(_draw_shape(dimensions[i], rng) for i in term), float(share))
        for term, share in zip(members, [*mains, *products], strict=True)
    )


def _draw_shape(dimension: Dimension, rng: np.random.Generator) -> Shape:
    """Draw a slope, a peak or a cliff, or a value for each name; standardised over the range."""
    if dimension.choices:
        levels = rng.standard_normal(len(dimension.choices))
        levels = (levels - levels.mean()) / levels.std()
        return lambda places: levels[places.astype(int)]
    form, centre, sign = rng.integers(3), rng.uniform(-0.6, 0.6), rng.choice([-1.0, 1.0])

    def compute(places: Floats) -> Floats:
        if form == 0:
            return sign * places
        if form == 1:
            return -((places - centre) ** 2)
        return sign / (1 + np.exp((places - centre) / 0.15))

    grid = compute(np.linspace(-1, 1, 2001))
    return lambda places: (compute(places) - grid.mean()) / grid.std()


def _scale(surface: Surface, points: Floats) -> tuple[Callable[[Params], float], dict[str, float]]:
    """Return the objective of a configuration, and the total Sobol index of each parameter."""
    size = points.shape[1] // 2
    left, right = points[:, :size], points[:, size:]
    values = surface.compute(left)
    centre, deviation = float(values.mean()), float(values.std())
    shares: dict[str, float] = {}
    for i, dimension in enumerate(surface.encoder.dimensions):
        moved = left.copy()
        moved[:, i] = right[:, i]
        change = values - surface.compute(moved)
        shares[dimension.name] = float((change**2).mean() / 2 / deviation**2)

    def compute_worth(params: Params) -> float:
        value = float(surface.compute(surface.encoder.convert(params)[None])[0])
        return CENTRE + DEVIATION * (value - centre) / deviation

    return compute_worth, shares


def _run_sweep(
    spec: SweepSpec,
    worth: dict[str, Callable[[Params], float]],
    deviation: float,
    rng: np.random.Generator,
) -> tuple[TrialRecord, ...]:
    """Run a sweep with the product's sampler; nothing is trained."""
    projection = Projection(spec)
    records: list[TrialRecord] = []
    for number in range(spec.search.trials):
        suggestion = projection.propose()
        values = {
            goal: Estimate(compute(suggestion.params) + rng.normal(0, deviation), deviation)
            for goal, compute in worth.items()
        }
        record = TrialRecord(
            number=number,
            role="search",
            state="complete",
            params=suggestion.params,
            seed=number,
            proposer=suggestion.proposer,
            validation=values,
            test=values,
            feasible=True,
        )
        projection.observe(record, suggestion.sampler_state)
        records.append(record)
    return tuple(records)
