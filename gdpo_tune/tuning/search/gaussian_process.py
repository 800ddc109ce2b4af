"""Optuna's Gaussian process, every other proposal in a box around a member of the front.

Expected hypervolume improvement over the whole space likes its corners: there the process knows
least, and where the objectives have an optimum inside, most of a short search is spent on them. A
box around a configuration that adds to the hypervolume keeps half of the proposals where something
was found, as trust regions do.
Source: Daulton et al. 2022, Multi-objective Bayesian optimization over high-dimensional search
spaces (MORBO): boxes around members of the front that contribute to the hypervolume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import GPSampler
from optuna.trial import FrozenTrial, TrialState

from gdpo_tune.analysis.pareto import contributions
from gdpo_tune.core.trials import Objective

BOX_SHARE = 0.5
"""Share of the proposals that come from a box."""
BOX_STARTUP = 10
"""Complete trials before the first box: earlier, a front is not yet where it will be."""
BOX_SIDE = 0.3
"""Of a box, as a share of a continuous parameter's range, on the range's own scale."""

CANDIDATES = 512
"""Points at which a proposal's search begins; Optuna's 2048 cost as much as all that follows."""
DRAWS = 64
"""Of the posterior, to average over; Optuna's 128 double the time, which the trials pay."""


class GaussianProcess(GPSampler):
    """Proposes by expected hypervolume improvement, in the whole space or in a box.

    One thread: its tensors are tiny, and on two busy cores threads triple the CPU time of a
    proposal and take it from the trials.
    """

    def __init__(self, objectives: Sequence[Objective], seed: int, startup: int) -> None:
        """
        Args:
            objectives: those of the study, whose references say what adds to the hypervolume.
            seed: of this proposal.
            startup: complete trials before which it proposes at random.
        """
        super().__init__(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
        self._n_preliminary_samples = CANDIDATES
        self._n_qmc_samples_ehvi = DRAWS
        self._objectives = objectives
        self._draws = np.random.default_rng(seed)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Propose, with torch held to one thread meanwhile."""
        import torch

        if self._draws.random() < BOX_SHARE:
            search_space = self._box(study, search_space)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().sample_relative(study, trial, search_space)
        finally:
            torch.set_num_threads(threads)

    def _box(
        self, study: Study, search_space: dict[str, BaseDistribution]
    ) -> dict[str, BaseDistribution]:
        """The space around a random trial that adds to the hypervolume; all of it if none does."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(trials) < BOX_STARTUP:
            return search_space
        allowed = [
            t for t in trials if all(excess <= 0 for excess in (t.constraints or {}).values())
        ]
        gains = contributions([t.values for t in allowed], self._objectives)
        if not gains.any():
            return search_space
        centre = allowed[self._draws.choice(np.flatnonzero(gains))].params
        return {name: shrink_around(centre[name], domain) for name, domain in search_space.items()}


def shrink_around(value: Any, domain: BaseDistribution) -> BaseDistribution:
    """The part of a continuous range that is near `value`; any other domain stays as it is."""
    if not isinstance(domain, FloatDistribution) or domain.step is not None:
        return domain
    forward, back = (math.log, math.exp) if domain.log else (float, float)
    low, high = forward(domain.low), forward(domain.high)
    half = BOX_SIDE / 2 * (high - low)
    return FloatDistribution(
        max(domain.low, back(forward(value) - half)),
        min(domain.high, back(forward(value) + half)),
        log=domain.log,
    )
