"""Samplers: one function builds the `SamplerFactory` of each.

Constraints reach a sampler as constraint values on every trial of its study. So no factory needs to
pass them on.
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
from optuna.samplers import BaseSampler, NSGAIIISampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from gdpo_tune.ledger import convert_to_distribution
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.search.gaussian_process import GaussianProcess
from gdpo_tune.tuning.search.startup import list_spanning_weights

NEVER = sys.maxsize
"""The start-up of a sampler without a model."""
FIRST_GENERATION = {f"{kind.__name__}:generation": 0 for kind in (NSGAIISampler, NSGAIIISampler)}
"""Attributes by which Optuna's genetic algorithms accept a trial as a parent."""


@dataclass(frozen=True)
class SamplerFactory:
    """Factory of a sampler, and its start-up."""

    build: Callable[[int], BaseSampler]
    """Function from a seed to a new Optuna sampler."""
    startup: int
    """Number of complete configurations from which the sampler's model proposes."""
    quasi_random: bool
    """True if the start-up is our Sobol sequence, False if the sampler has its own start-up."""
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes that a trial needs to count, if the sampler did not propose it."""

    @property
    def has_model(self) -> bool:
        """True if the sampler ever learns from a trial."""
        return self.startup < NEVER


def build_gp(spec: SweepSpec) -> SamplerFactory:
    """Build the Gaussian process: one for each objective, expected hypervolume improvement.

    It accounts for running trials and for constraints.
    """
    objectives, startup = spec.list_objectives(), count_startup_trials(spec)
    return SamplerFactory(
        lambda seed: GaussianProcess(objectives, seed, startup), startup, quasi_random=True
    )


class ParzenEstimator(TPESampler):
    """Optuna's TPE sampler with given dimensions.

    Every entry of the study has all of them. Optuna would compare the dimensions of all entries for
    each proposal, which takes half of its time with thousands of entries.
    """

    def __init__(self, dimensions: Mapping[str, BaseDistribution], seed: int, startup: int) -> None:
        """Set up the sampler of one proposal: random before `startup` complete trials."""
        super().__init__(seed=seed, n_startup_trials=startup, multivariate=True)
        self._dimensions = dimensions

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return every dimension with more than one value, by name, as Optuna orders them."""
        ordered = sorted(self._dimensions.items())
        return {name: dimension for name, dimension in ordered if not dimension.single()}


def build_tpe(spec: SweepSpec) -> SamplerFactory:
    """Build the multi-objective tree-structured Parzen estimator over all dimensions jointly."""
    startup = count_startup_trials(spec)
    dimensions = {
        name: convert_to_distribution(domain)
        for name, domain in spec.space.searched_domains.items()
    }
    return SamplerFactory(
        lambda seed: ParzenEstimator(dimensions, seed, startup), startup, quasi_random=True
    )


def build_nsga2(spec: SweepSpec) -> SamplerFactory:
    """Build the genetic algorithm with crowding distance; its first generation is uniform."""
    population = choose_population_size(spec)
    return SamplerFactory(
        lambda seed: NSGAIISampler(seed=seed, population_size=population),
        population,
        quasi_random=False,
        attrs=FIRST_GENERATION,
    )


def build_nsga3(spec: SweepSpec) -> SamplerFactory:
    """Build the genetic algorithm with reference points; its first generation is uniform."""
    population = choose_population_size(spec)

    def build(seed: int) -> BaseSampler:
        with warnings.catch_warnings():
            # "experimental" since 2023; the version of Optuna is capped
            warnings.simplefilter("ignore", ExperimentalWarning)
            return NSGAIIISampler(seed=seed, population_size=population)

    return SamplerFactory(build, population, quasi_random=False, attrs=FIRST_GENERATION)


def build_random(_: SweepSpec) -> SamplerFactory:
    """Build the sampler that draws uniformly over the space, without a model."""
    return SamplerFactory(lambda seed: RandomSampler(seed=seed), NEVER, quasi_random=False)


def build_qmc(_: SweepSpec) -> SamplerFactory:
    """Build our Sobol sequence to the end, more even than uniform draws, without a model."""
    return SamplerFactory(lambda seed: RandomSampler(seed=seed), NEVER, quasi_random=True)


def count_startup_trials(spec: SweepSpec) -> int:
    """Return the trials before a model: few, since with four it beats chance (docs/search.md).

    All points that merges need are among them.
    """
    return max(len(list_spanning_weights(spec)), min(10, max(4, spec.search.trials // 8)))


def choose_population_size(spec: SweepSpec) -> int:
    """Choose a generation's size, small enough for several generations within the sweep."""
    return min(50, max(4, spec.search.trials // 5))
