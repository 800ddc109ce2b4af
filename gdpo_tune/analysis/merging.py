"""Merging: the choice of the merge whose evaluation is expected to add most hypervolume.

A merge with weights w of parents with values y_i lies near their weighted mean, and on average a
little above it, the more so the more they differ. With m(w) and v(w) the weighted mean and variance
of the parents' values, each objective divided by the span of the parents, an objective is modelled
as a Gaussian process over the weights:

    f(w) = m(w) + u(w) (BUMP + g(w)),        u(w)^2 = 2 v(w) + 2 (mean of v(w) over objectives)
    cov(g(w), g(w')) = SHARED^2 + LOCAL^2 exp(-|w - w'|^2 / (2 REACH^2))

Half way between two parents that differ equally in all objectives, u is their difference; at a
parent it is 0. The values of parents and merges are known up to the errors of their evaluations, so
every merge measured so far corrects f, and with it the values of its parents. What a merge is
expected to add follows in closed form.

Only validation values count: test values are left to what is claimed in the end.

Source: Emmerich, Deutz and Klinkenberg 2011, Hypervolume-based expected improvement. The constants
were fitted to 80 merges of trainings of `code`: see docs/search.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from gdpo_tune.analysis.expected_gains import TINY, compute_expected_gains
from gdpo_tune.analysis.pareto import (
    Floats,
    compute_loss_hypervolume,
    compute_losses,
    convert_references,
    mark_front,
    select_front,
)
from gdpo_tune.core.candidates import Part
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord

Policy = tuple[int, int]
"""Number of a trial and steps of its training."""
Mixture = dict[Policy, float]
"""Policy -> weight; the weights sum to 1."""

Rounded = frozenset[tuple[Policy, float]]

MOST_PARENTS = 24
"""Parents considered, spread evenly over the front: keeps a thousand trials cheap."""
MOST_GROUPS = 400
"""Groups of parents of one size considered, of those that lie farthest apart."""
BUMP = 0.08
SHARED = 0.1
LOCAL = 0.15
REACH = 0.5
"""Constants of the model at the head of this module, as shares of `u` and as a distance."""
WORTHWHILE = 0.001
"""Share of the hypervolume that a merge must be expected to add."""
NEAR = 1.0
"""Standard errors by which a parent may trail the front in every objective."""


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


def choose_merge(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], most_parts: int
) -> tuple[Part, ...] | None:
    """Choose the merge that is expected to add most hypervolume on validation prompts.

    Parents are the ends and checkpoints of feasible trainings that were kept. Merges in any state
    count as tried. One that runs counts as if it had its predicted values, so that merges that run
    together differ. Equal records give an equal choice.

    Returns:
        Its parts by trial and step, or None if no merge is expected to add `WORTHWHILE`.
    """
    goals = tuple(objectives)
    ordered = sorted(records, key=lambda record: record.number)
    policies = [
        _read_values(record, {policy: 1.0}, goals)
        for record in ordered
        if record.state == "complete" and (policy := _get_policy(record)) is not None
    ]
    policies = [policy for policy in policies if policy.is_measured]
    tried = [
        _read_values(record, {(part.trial, part.step): part.weight for part in record.parts}, goals)
        for record in ordered
        if record.role == "merge"
    ]
    parents = _select_parents(policies)
    mixtures = _list_mixtures(parents, tried, most_parts)
    if not mixtures:
        return None
    seen = [
        entry
        for entry in [*policies, *tried]
        if entry.record.feasible is not False and (entry.is_measured or entry.record.is_open)
    ]
    asked = [*mixtures, *(entry.mixture for entry in seen)]
    means, errors = predict_losses(asked, parents, [*policies, *tried])
    front = select_front(means[len(mixtures) :])
    gains = compute_expected_gains(
        means[: len(mixtures)], errors[: len(mixtures)], front, convert_references(goals)
    )
    best = int(np.argmax(np.round(gains, 12)))
    if gains[best] <= WORTHWHILE * compute_loss_hypervolume(front, goals):
        return None
    return tuple(Part(*policy, weight) for policy, weight in sorted(mixtures[best].items()))


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


def _select_parents(policies: Sequence[Evaluated]) -> list[Evaluated]:
    """Select at most `MOST_PARENTS` on the front or within an error of it, farthest apart first."""
    kept = [policy for policy in policies if policy.record.checkpoint is not None]
    if not kept:
        return []
    losses, errors = np.array([p.losses for p in kept]), np.array([p.errors for p in kept])
    near = np.ones(len(kept), dtype=np.bool_)
    for member in np.flatnonzero(mark_front(losses)):
        margin = NEAR * np.hypot(errors, errors[member])
        near &= ~((losses - losses[member] > margin).all(axis=1))
    kept, losses = [p for p, is_near in zip(kept, near, strict=True) if is_near], losses[near]
    scaled = losses / np.maximum(np.ptp(losses, axis=0), TINY)
    order = [int(np.argmin(scaled[:, 0]))]
    distances = np.full(len(kept), np.inf)
    while len(order) < min(len(kept), MOST_PARENTS):
        distances = np.minimum(distances, np.linalg.norm(scaled - scaled[order[-1]], axis=1))
        distances[order] = -1.0
        order.append(int(np.argmax(distances)))
    return [kept[index] for index in order]


def _list_mixtures(
    parents: Sequence[Evaluated], tried: Sequence[Evaluated], most_parts: int
) -> list[Mixture]:
    """List the merges that may come next, none of them tried.

    They are the middles of two parents or of measured merges on the front, which bisects what was
    tried before, and groups of parents with even weights or half of the weight on one.
    """
    policies = [next(iter(parent.mixture)) for parent in parents]
    result: dict[Rounded, Mixture] = {}
    for left, right in combinations(_list_front_mixtures(parents, tried), 2):
        middle = {p: (left.get(p, 0.0) + right.get(p, 0.0)) / 2 for p in left | right}
        if len(middle) <= most_parts:
            result.setdefault(_round(middle), middle)
    for size in range(3, most_parts + 1):
        count = next(n for n in range(len(policies), -1, -1) if math.comb(n, size) <= MOST_GROUPS)
        for group in combinations(policies[:count], size):
            for weights in _list_centres(size):
                mixture = dict(zip(group, weights, strict=True))
                result.setdefault(_round(mixture), mixture)
    done = {_round(merge.mixture) for merge in tried}
    return [mixture for key, mixture in result.items() if key not in done]


def _list_front_mixtures(parents: Sequence[Evaluated], tried: Sequence[Evaluated]) -> list[Mixture]:
    """List the parents, and the merges that neither a parent nor another merge dominates."""
    merges = [merge for merge in tried if merge.is_measured and merge.record.feasible is not False]
    known = [*parents, *merges]
    if not known:
        return []
    kept = mark_front(np.array([entry.losses for entry in known]))
    kept[: len(parents)] = True
    return [entry.mixture for entry, is_kept in zip(known, kept, strict=True) if is_kept]


def _list_centres(size: int) -> list[tuple[float, ...]]:
    """List equal weights, and those where one parent has half."""
    half, rest = 0.5, 0.5 / (size - 1)
    equal = (1 / size,) * size
    return [equal, *(tuple(half if i == j else rest for j in range(size)) for i in range(size))]


def _round(mixture: Mixture) -> Rounded:
    return frozenset((policy, round(weight, 6)) for policy, weight in mixture.items())


def _get_policy(record: TrialRecord) -> Policy | None:
    """Return the policy that a record evaluates; None if it is no candidate that merges use."""
    if record.role == "checkpoint":
        return record.parts[0].trial, record.parts[0].step
    if record.role in ("search", "published", "member") and record.rungs:
        return record.number, record.rungs[-1].step
    return None


def _read_values(
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
