"""Optuna's Gaussian process, every other proposal in a box around a member of the front.

Expected hypervolume improvement over the whole space favours its corners, where the process is
least certain. If the optimum is inside the space, a short search spends most of its trials there.
A box around a configuration that adds to the hypervolume keeps half of the proposals near good
configurations, as trust regions do.
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

from gdpo_tune.analysis.pareto import compute_contributions
from gdpo_tune.core.trials import Objective

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


class GaussianProcess(GPSampler):
    """Sampler by expected hypervolume improvement, in the whole space or in a box.

    It uses one thread: its tensors are tiny. On two busy cores threads triple the CPU time of a
    proposal and take it from the trials.
    """

    def __init__(self, objectives: Sequence[Objective], seed: int, startup: int) -> None:
        """Set up the sampler of one proposal: random before `startup` complete trials.

        The references of the study's objectives define the hypervolume.
        """
        super().__init__(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
        self._n_preliminary_samples = CANDIDATES
        self._n_qmc_samples_ehvi = DRAWS
        self._objectives = objectives
        self._box_rng = np.random.default_rng(seed)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Propose values, with torch limited to one thread meanwhile."""
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
            t for t in trials if all(excess <= 0 for excess in (t.constraints or {}).values())
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
