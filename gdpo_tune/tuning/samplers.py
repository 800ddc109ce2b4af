"""Samplers: one function builds the `SamplerFactory` of each.

Constraints reach a sampler as constraint values on every trial of its study.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from gdpo_tune.analysis.pareto import compute_contributions
from gdpo_tune.core.trials import Objective
from gdpo_tune.ledger.trial_encoding import convert_to_distribution
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.first_trials import list_spanning_weights

NEVER = sys.maxsize
"""The start-up of a sampler without a model."""
BOX_SHARE = 0.5
"""Share of the proposals that come from a box."""
BOX_STARTUP = 10
"""Number of complete trials before the first box: earlier, the front still moves much."""
BOX_SIDE = 0.3
"""Side of a box, as a share of a continuous parameter's range, on the range's own scale."""
CANDIDATES = 512
"""Starting points of a proposal's search; Optuna's 2048 cost as much as the search itself."""
DRAWS = 64
"""Draws of the posterior that are averaged; Optuna's 128 double the CPU time."""


@dataclass(frozen=True)
class SamplerFactory:
    """Factory of a sampler, and its start-up."""

    build: Callable[[int], BaseSampler]
    """Function from a seed to a new Optuna sampler."""
    startup: int
    """Number of complete configurations from which the sampler's model proposes."""
    quasi_random: bool
    """True if the start-up is our Sobol sequence, False if the sampler has its own start-up."""

    @property
    def has_model(self) -> bool:
        """True if the sampler ever learns from a trial."""
        return self.startup < NEVER


class GaussianProcess(GPSampler):
    """Optuna's Gaussian process, every other proposal in a box around a member of the front.

    Expected hypervolume improvement favours the corners of the space, where the process is least
    certain: a short search would spend most of its trials there. A box around a configuration that
    adds to the hypervolume keeps half of the proposals near good ones, as trust regions do.

    Source: Daulton et al. 2022, Multi-objective Bayesian optimization over high-dimensional search
    spaces (MORBO): boxes around members of the front that contribute to the hypervolume.
    """

    def __init__(self, objectives: Sequence[Objective], seed: int, startup: int) -> None:
        """Set up the sampler of one proposal: random before `startup` complete trials."""
        super().__init__(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
        self._n_preliminary_samples = CANDIDATES
        self._n_qmc_samples_ehvi = DRAWS
        self._objectives = objectives
        self._box_rng = np.random.default_rng(seed)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Propose values, in one thread: its tensors are tiny, and trials need the other cores."""
        import torch

        if self._box_rng.random() < BOX_SHARE:
            search_space = self._restrict_to_box(study, search_space)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().sample_relative(study, trial, search_space)
        finally:
            torch.set_num_threads(threads)

    def _restrict_to_box(
        self, study: Study, search_space: dict[str, BaseDistribution]
    ) -> dict[str, BaseDistribution]:
        """Return a box around a random trial that adds to the hypervolume; all if none does."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(trials) < BOX_STARTUP:
            return search_space
        allowed = [
            t for t in trials if all(violation <= 0 for violation in (t.constraints or {}).values())
        ]
        gains = compute_contributions([t.values for t in allowed], self._objectives)
        if not gains.any():
            return search_space
        centre = allowed[self._box_rng.choice(np.flatnonzero(gains))].params
        return {name: shrink_around(centre[name], domain) for name, domain in search_space.items()}


def shrink_around(value: Any, domain: BaseDistribution) -> BaseDistribution:
    """Return the part of a continuous range near `value`; any other domain unchanged."""
    if not isinstance(domain, FloatDistribution) or domain.step is not None:
        return domain
    scale, unscale = (math.log, math.exp) if domain.log else (float, float)
    low, high = scale(domain.low), scale(domain.high)
    half = BOX_SIDE / 2 * (high - low)
    return FloatDistribution(
        max(domain.low, unscale(scale(value) - half)),
        min(domain.high, unscale(scale(value) + half)),
        log=domain.log,
    )


def build_gp(spec: SweepSpec) -> SamplerFactory:
    """Build the Gaussian process, one for each objective: expected hypervolume improvement."""
    objectives, startup = spec.list_objectives(), count_startup_trials(spec)
    return SamplerFactory(
        lambda seed: GaussianProcess(objectives, seed, startup), startup, quasi_random=True
    )


class ParzenEstimator(TPESampler):
    """Optuna's TPE sampler with given dimensions, which every entry of the study has.

    Optuna would compare those of all entries, half of its time with thousands of them.
    """

    def __init__(self, dimensions: Mapping[str, BaseDistribution], seed: int, startup: int) -> None:
        """Set up the sampler of one proposal: random before `startup` complete trials."""
        super().__init__(seed=seed, n_startup_trials=startup, multivariate=True)
        self._dimensions = dimensions

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return every dimension, by name, as Optuna orders them."""
        return dict(sorted(self._dimensions.items()))


def build_tpe(spec: SweepSpec) -> SamplerFactory:
    """Build the multi-objective tree-structured Parzen estimator over all dimensions jointly."""
    startup = count_startup_trials(spec)
    domains = spec.space.searched_domains
    dimensions = {name: convert_to_distribution(domain) for name, domain in domains.items()}
    return SamplerFactory(
        lambda seed: ParzenEstimator(dimensions, seed, startup), startup, quasi_random=True
    )


def build_random(_: SweepSpec) -> SamplerFactory:
    """Build the sampler that draws uniformly over the space, without a model."""
    return SamplerFactory(lambda seed: RandomSampler(seed=seed), NEVER, quasi_random=False)


def build_qmc(_: SweepSpec) -> SamplerFactory:
    """Build our Sobol sequence to the end, more even than uniform draws, without a model."""
    return SamplerFactory(lambda seed: RandomSampler(seed=seed), NEVER, quasi_random=True)


def count_startup_trials(spec: SweepSpec) -> int:
    """Return the trials before a model: all that merges need, and few (see docs/search.md)."""
    return max(len(list_spanning_weights(spec)), min(10, max(4, spec.search.trials // 8)))
