"""Who proposes configurations: one small function a sampler.

Each returns a `SamplerFactory`. Constraints reach a sampler as constraint values on every trial of the
projection study, so no sampler needs to be told about them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    NSGAIIISampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial

from gdpo_tune.ledger import to_distribution
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.search.gaussian_process import GaussianProcess

NEVER = sys.maxsize
"""The start-up of a sampler without a model."""
FIRST_GENERATION = {f"{kind.__name__}:generation": 0 for kind in (NSGAIISampler, NSGAIIISampler)}
"""Optuna's genetic algorithms take a trial for a parent by its generation alone."""


@dataclass(frozen=True)
class SamplerFactory:
    """How configurations are proposed."""

    build: Callable[[int], BaseSampler]
    """Seed -> a new Optuna sampler."""
    startup: int
    """Complete configurations from which on the sampler's model is asked."""
    quasi_random: bool
    """Whether the start-up is a Sobol sequence of ours; else the sampler has a start of its own."""

    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a trial needs beside its values to count, where the sampler did not propose it."""

    @property
    def has_model(self) -> bool:
        """Whether it ever learns from a trial."""
        return self.startup < NEVER


def build_gp(spec: SweepSpec) -> SamplerFactory:
    """A Gaussian process an objective; proposes by expected hypervolume improvement.

    It accounts for running trials and for constraints.
    """
    objectives, startup = spec.objective_list(), count_startup_trials(spec)
    return SamplerFactory(
        lambda seed: GaussianProcess(objectives, seed, startup), startup, quasi_random=True
    )


class ParzenEstimator(TPESampler):
    """Optuna's own, told its dimensions.

    Every entry of the projection has all of them. Optuna would compare those of all entries for
    each proposal, which at thousands is half of its time.
    """

    def __init__(self, dimensions: Mapping[str, BaseDistribution], seed: int, startup: int) -> None:
        """
        Args:
            dimensions: name -> distribution.
            seed: of this proposal.
            startup: complete trials before which it proposes at random.
        """
        super().__init__(seed=seed, n_startup_trials=startup, multivariate=True)
        self._dimensions = dimensions

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Every dimension with more than one value, by name, as Optuna orders them."""
        found = sorted(self._dimensions.items())
        return {name: dimension for name, dimension in found if not dimension.single()}


def build_tpe(spec: SweepSpec) -> SamplerFactory:
    """Multi-objective tree-structured Parzen estimator over all dimensions jointly."""
    startup = count_startup_trials(spec)
    dimensions = {name: to_distribution(domain) for name, domain in spec.space.searched.items()}
    return SamplerFactory(
        lambda seed: ParzenEstimator(dimensions, seed, startup), startup, quasi_random=True
    )


def build_nsga2(spec: SweepSpec) -> SamplerFactory:
    """Genetic algorithm, crowding distance; its first generation is uniform."""
    population = choose_population_size(spec)
    return SamplerFactory(
        lambda seed: NSGAIISampler(seed=seed, population_size=population),
        population,
        quasi_random=False,
        attrs=FIRST_GENERATION,
    )


def build_nsga3(spec: SweepSpec) -> SamplerFactory:
    """Genetic algorithm, reference points; its first generation is uniform."""
    population = choose_population_size(spec)

    def build(seed: int) -> BaseSampler:
        with warnings.catch_warnings():
            # "experimental", and so since 2023; the version of Optuna is capped
            warnings.simplefilter("ignore", ExperimentalWarning)
            return NSGAIIISampler(seed=seed, population_size=population)

    return SamplerFactory(build, population, quasi_random=False, attrs=FIRST_GENERATION)


def build_random(spec: SweepSpec) -> SamplerFactory:
    """Uniform over the space: no model, ever."""
    del spec
    return SamplerFactory(lambda seed: RandomSampler(seed=seed), NEVER, quasi_random=False)


def build_qmc(spec: SweepSpec) -> SamplerFactory:
    """Our Sobol sequence to the end: no model, ever, but more even than uniform draws."""
    del spec
    return SamplerFactory(lambda seed: RandomSampler(seed=seed), NEVER, quasi_random=True)


def count_startup_trials(spec: SweepSpec) -> int:
    """Trials before a model: few, since even with four it beats chance; see docs/search.md."""
    return min(10, max(4, spec.search.trials // 8))


def choose_population_size(spec: SweepSpec) -> int:
    """Members of a generation: small enough for several generations within the sweep."""
    return min(50, max(4, spec.search.trials // 5))
