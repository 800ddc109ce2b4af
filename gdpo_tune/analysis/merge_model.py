"""Model of merges: their expected values, given those of their parents and of other merges.

A merge with weights w of parents with values y_i lies near their weighted mean, and on average a
little above it, the more so the more they differ. With m(w) and v(w) the weighted mean and variance
of the parents' values, each objective divided by the span of the parents, an objective is modelled
as a Gaussian process over the weights:

    f(w) = m(w) + u(w) (BUMP + g(w)),        u(w)^2 = 2 v(w) + 2 (mean of v(w) over objectives)
    cov(g(w), g(w')) = SHARED^2 + LOCAL^2 exp(-|w - w'|^2 / (2 REACH^2))

Half way between two parents that differ equally in all objectives, u is their difference; at a
parent it is 0. The values of parents and merges are known up to the errors of their evaluations, so
every merge measured so far corrects f, and with it the values of its parents.

The constants were chosen on 35 merges of five trainings of `code`. On 247 merges of `code` and 169
of `math`, each predicted from those before it, the error is .060 and .063 of the span; that of the
line between the parents is .105 and .115, and the noise of an evaluation alone .052 and .043.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdpo_tune.analysis.expected_gains import TINY
from gdpo_tune.analysis.pareto import Floats, compute_losses
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord

Policy = tuple[int, int]
"""Number of a trial and steps of its training."""
Mixture = dict[Policy, float]
"""Policy -> weight; the weights sum to 1."""

BUMP = 0.08
SHARED = 0.1
LOCAL = 0.15
REACH = 0.5
"""Constants of the model at the head of this module, as shares of `u` and as a distance."""


@dataclass(frozen=True)
class Evaluated:
    """A policy or a merge of policies with its validation values."""

    mixture: Mixture
    losses: Floats
    """`float[M]`; NaN if it was not measured."""
    errors: Floats
    """Standard errors of `losses`; an unknown one counts as 0."""
    record: TrialRecord

    @property
    def is_measured(self) -> bool:
        """True if every objective is known."""
        return bool(np.isfinite(self.losses).all())


def read_evaluated(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> list[Evaluated]:
    """Read all that was evaluated on validation prompts, by number of the trial.

    These are trainings and checkpoints that are complete, and merges in any state. Trials that are
    not comparable are left out.
    """
    result: list[Evaluated] = []
    comparable = (record for record in records if record.is_comparable)
    for record in sorted(comparable, key=lambda record: record.number):
        mixture = {(part.trial, part.step): part.weight for part in record.parts}
        if record.role in ("search", "published", "member") and record.rungs:
            mixture = {(record.number, record.rungs[-1].step): 1.0}
        is_known = record.state == "complete" and record.role != "replicate" and mixture
        if is_known or record.role == "merge":
            result.append(read_values(record, mixture, objectives))
    return result


def predict_losses(
    mixtures: Sequence[Mixture], parents: Sequence[Evaluated], known: Sequence[Evaluated]
) -> tuple[Floats, Floats]:
    """Predict mixtures by the model at the head of this module, given what was measured.

    `parents` give the span of each objective. A mixture of a policy that is not `known` is NaN.

    Returns:
        Means and standard errors of the true losses, each `[mixtures, M]`.
    """
    ends = {next(iter(entry.mixture)): entry for entry in known if len(entry.mixture) == 1}
    merges = [
        entry
        for entry in known
        if len(entry.mixture) > 1 and entry.is_measured and entry.mixture.keys() <= ends.keys()
    ]
    span = np.maximum(np.ptp([parent.losses for parent in parents], axis=0), TINY)
    used = {policy for m in [*mixtures, *(merge.mixture for merge in merges)] for policy in m}
    places = {policy: place for place, policy in enumerate(sorted(used & ends.keys()))}
    values = np.array([ends[policy].losses for policy in places]) / span
    noise = (np.array([ends[policy].errors for policy in places]) / span) ** 2
    weights = _build_weights(mixtures, places)
    observed = _build_weights([merge.mixture for merge in merges], places)
    prior, reach = _compute_prior(weights, values)
    line, extent = _compute_prior(observed, values)
    near, between = _compute_covariance(weights, observed), _compute_covariance(observed, observed)
    means, errors = prior, np.empty_like(prior)
    for column in range(len(span)):
        variance = (weights**2) @ noise[:, column] + reach[:, column] ** 2 * (SHARED**2 + LOCAL**2)
        if merges:
            cross = (weights * noise[:, column]) @ observed.T
            cross += near * np.outer(reach[:, column], extent[:, column])
            inner = (observed * noise[:, column]) @ observed.T
            inner += between * np.outer(extent[:, column], extent[:, column])
            inner += np.diag([(m.errors[column] / span[column]) ** 2 + TINY for m in merges])
            rest = np.array([m.losses[column] for m in merges]) / span[column] - line[:, column]
            gain = np.linalg.solve(inner, cross.T).T
            means[:, column] += gain @ rest
            variance -= (gain * cross).sum(axis=1)
        errors[:, column] = np.sqrt(np.maximum(variance, 0.0))
    return means * span, errors * span


def _build_weights(mixtures: Sequence[Mixture], places: Mapping[Policy, int]) -> Floats:
    """Build the weights of mixtures, `float[N, P]`; NaN for one with an unknown policy."""
    weights = np.zeros((len(mixtures), len(places)))
    for row, mixture in zip(weights, mixtures, strict=True):
        if mixture.keys() <= places.keys():
            row[[places[policy] for policy in mixture]] = list(mixture.values())
        else:
            row[:] = np.nan
    return weights


def _compute_prior(weights: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Compute m + u BUMP as losses, and u, each `[N, M]`."""
    middle = weights @ values
    variance = np.maximum(weights @ values**2 - middle**2, 0.0)
    reach = np.sqrt(2 * variance + 2 * variance.mean(axis=1, keepdims=True))
    return middle - BUMP * reach, reach


def _compute_covariance(left: Floats, right: Floats) -> Floats:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return SHARED**2 + LOCAL**2 * np.exp(-squares / (2 * REACH**2))


def read_values(
    record: TrialRecord, mixture: Mixture, objectives: Sequence[Objective]
) -> Evaluated:
    """Read validation values, those of the last rung where a trial has not ended."""
    values = record.validation or (record.rungs[-1].validation if record.rungs else {})
    unknown = Estimate(math.nan, math.nan)
    found = [values.get(objective.name, unknown) for objective in objectives]
    return Evaluated(
        mixture=mixture,
        losses=compute_losses([[estimate.mean for estimate in found]], objectives)[0],
        errors=np.nan_to_num([estimate.se for estimate in found]),
        record=record,
    )
