"""Choice of the merge that best meets a wish: floors and ceilings of metrics, and preferences.

`merge_model.py` predicts every metric of a merge. What is wished for is the preferred mean

    U(w) = sum_m p_m value_m(w) / span_m / sum_m p_m

under limits of metrics. The next merge to evaluate has the largest probability of keeping every
limit times the expected improvement of U over the best policy or merge that keeps them; while none
does, the largest probability. Metrics count as independent.

Source: Gardner et al. 2014, Bayesian optimization with inequality constraints, section 3.

Shapes: N merges, M metrics, L limits. Metrics are losses, as there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from scipy.special import ndtr

from gdpo_tune.analysis.expected_gains import TINY, compute_shortfalls
from gdpo_tune.analysis.merge_choice import Rounded, list_centres, list_groups, round_mixture
from gdpo_tune.analysis.merge_model import Evaluated, Mixture, Policy, predict_losses
from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.core.trials import Objective

FINENESS = {2: 20, 3: 10}
"""Parts of a merge -> number of equal shares that its weights are made of."""
HOPE = 2.0
"""Standard errors by which a prediction may break a limit that its merge may still keep."""


@dataclass(frozen=True)
class Limit:
    """Smallest or largest value of a metric."""

    metric: str
    is_floor: bool
    value: float


@dataclass(frozen=True)
class Aim:
    """A wish in numbers."""

    metrics: tuple[Objective, ...]
    """Metrics that are predicted; their references do not count."""
    limits: tuple[Limit, ...]
    preferences: tuple[float, ...]
    """Weight of each of `metrics` in what is maximised, at least 0 and not all 0."""

    def compute_excess(self, losses: Floats) -> Floats:
        """Compute how far values lie beyond each limit, `float[N, L]`; 0 or less keeps it."""
        names = [metric.name for metric in self.metrics]
        columns = [names.index(limit.metric) for limit in self.limits]
        values = losses[:, columns] * [
            -1.0 if self.metrics[column].direction == "maximize" else 1.0 for column in columns
        ]
        gaps = values - [limit.value for limit in self.limits]
        return gaps * [-1.0 if limit.is_floor else 1.0 for limit in self.limits]

    def select_limited(self, columns: Floats) -> Floats:
        """Return the columns of the limits, `[N, L]`, of ones of the metrics, `[N, M]`."""
        names = [metric.name for metric in self.metrics]
        return columns[:, [names.index(limit.metric) for limit in self.limits]]


@dataclass(frozen=True)
class Prediction:
    """A merge, with its losses as predicted or measured."""

    mixture: Mixture
    losses: Floats
    errors: Floats


@dataclass(frozen=True)
class WishChooser:
    """Choice among merges of `parents`, given what is known of policies and merges."""

    aim: Aim
    parents: Sequence[Evaluated]
    """Policies that can be merged."""
    known: Sequence[Evaluated]
    """Measured policies, the parents among them, and measured merges."""

    def predict(
        self, mixtures: Sequence[Mixture], evaluated: Sequence[Evaluated] = ()
    ) -> list[Prediction]:
        """Predict merges, given further evaluations."""
        means, errors = predict_losses(mixtures, self.parents, [*self.known, *evaluated])
        rows = zip(mixtures, means, errors, strict=True)
        return [Prediction(mixture, mean, error) for mixture, mean, error in rows]

    def choose_next(
        self, most_parts: int, evaluated: Sequence[Evaluated] = ()
    ) -> tuple[Prediction, bool] | None:
        """Choose the merge to evaluate next, which differs from those that are `evaluated`.

        Returns:
            The merge as predicted, and True if it may keep every limit; otherwise it is the closest
            to the limits. None if every merge is evaluated.
        """
        done = {round_mixture(entry.mixture) for entry in evaluated}
        mixtures = list_mixtures([get_policy(p) for p in self.parents], most_parts, done)
        if not mixtures:
            return None
        seen = [*self.parents, *(e for e in [*self.known, *evaluated] if len(e.mixture) > 1)]
        asked = self.predict([*mixtures, *(entry.mixture for entry in seen)], evaluated)
        means, errors = np.array([c.losses for c in asked]), np.array([c.errors for c in asked])
        count = len(mixtures)
        excess = self.aim.compute_excess(means)
        spread = np.maximum(self.aim.select_limited(errors), TINY)
        hopeful = (excess[:count] <= HOPE * spread[:count]).all(axis=1)
        if not hopeful.any():
            return asked[int(np.argmin(np.round(self._sum(excess[:count]), 12)))], False
        chance = self._compute_chance(excess[:count], errors[:count])
        value, error = self._compute_preferred(means, errors)
        best = value[count:][(excess[count:] <= 0).all(axis=1)]
        if len(best):
            gains = compute_shortfalls(-best.max(keepdims=True), -value[:count], error[:count])
            chance = chance * gains[:, 0]
        return asked[int(np.argmax(np.where(hopeful, chance, -1.0)))], True

    def find_best(self, measured: Sequence[Evaluated]) -> int:
        """Return the index of the measured merge that best meets the wish.

        One that keeps every limit comes before one that does not. Of those, the best has the
        largest product of its chance to keep them and of how far U lies above that of the worst
        parent; of the others, it is the closest to the limits.
        """
        losses = np.array([entry.losses for entry in measured])
        errors = np.array([entry.errors for entry in measured])
        excess = self.aim.compute_excess(losses)
        breaks = (excess > 0).any(axis=1)
        worst = min(
            self._compute_preferred(p.losses[None], p.errors[None])[0][0] for p in self.parents
        )
        gain = self._compute_preferred(losses, errors)[0] - worst
        gain = np.where(gain > 0, gain * self._compute_chance(excess, errors), gain)
        return int(np.lexsort((np.where(breaks, self._sum(excess), -gain), breaks))[0])

    @property
    def _span(self) -> Floats:
        return np.maximum(np.ptp([parent.losses for parent in self.parents], axis=0), TINY)

    def _compute_chance(self, excess: Floats, errors: Floats) -> Floats:
        """Compute the probability of keeping every limit, `float[N]`."""
        spread = np.maximum(self.aim.select_limited(errors), TINY)
        return ndtr(-excess / spread).prod(axis=1)

    def _sum(self, excess: Floats) -> Floats:
        """Sum what lies beyond the limits, each as a share of its span."""
        return (np.maximum(excess, 0.0) / self.aim.select_limited(self._span[None])).sum(axis=1)

    def _compute_preferred(self, losses: Floats, errors: Floats) -> tuple[Floats, Floats]:
        """Compute U and its standard error, each `float[N]`."""
        shares = np.array(self.aim.preferences) / sum(self.aim.preferences) / self._span
        return -losses @ shares, np.sqrt(errors**2 @ shares**2)


def get_policy(entry: Evaluated) -> Policy:
    """Return the policy of a parent."""
    return next(iter(entry.mixture))


def list_mixtures(
    policies: Sequence[Policy], most_parts: int, done: Collection[Rounded] = ()
) -> list[Mixture]:
    """List the merges of policies that may be chosen, without those that are `done`.

    Pairs in steps of a twentieth, threes in tenths, more with even weights or half of it on one; of
    many policies, groups of the first ones alone.
    """
    result: list[Mixture] = []
    for size in range(2, min(most_parts, len(policies)) + 1):
        shares = list(_list_shares(size))
        for group in combinations(policies, 2) if size == 2 else list_groups(policies, size):
            result += [dict(zip(group, weights, strict=True)) for weights in shares]
    return [mixture for mixture in result if round_mixture(mixture) not in done]


def _list_shares(size: int) -> Iterator[tuple[float, ...]]:
    """Yield the weights that a group of policies may have; each is above 0."""
    if size not in FINENESS:
        yield from list_centres(size)
        return
    total = FINENESS[size]
    for cuts in combinations(range(1, total), size - 1):
        edges = (0, *cuts, total)
        yield tuple((high - low) / total for low, high in pairwise(edges))
