"""Merging: the choice of the merge whose evaluation is expected to add most hypervolume.

A merge with weights w of parents with values y_i lies near the line between them, and on average a
little above it. So its value in an objective is modelled as a mixture polynomial:

    f(w) = sum_i w_i y_i + sum_{i<j} 4 w_i w_j (b + b_ij)

with y_i known up to the error of its evaluation, and normal priors for the bump b that all pairs
share and for b_ij of one pair. Every merge measured so far is an observation of f with its error.
The posterior of f is normal, which gives the hypervolume that a merge is expected to add.

Only validation values count: test values are left to what is claimed in the end.

Source: Scheffe 1958, Experiments with mixtures (the polynomial).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

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
FINEST = 8
"""Weights of two parents are multiples of 1 / this."""
BUMP = 0.03
"""Expected height of a half-way merge above the line between its parents, as a share of the span of
the parents in an objective: .016 to .031 of .5 to .7 on finished sweeps of `code` and `math`."""
SHARED_SPREAD = 0.03
"""Prior standard deviation of the bump that all pairs share, as a share of the span."""
PAIR_SPREAD = 0.05
"""Prior standard deviation of a pair's own bump, as a share of the span."""
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
    running = [merge.mixture for merge in tried if merge.record.is_open and not merge.is_measured]
    means, errors = predict_losses([*mixtures, *running], parents, [*policies, *tried])
    seen = [
        entry.losses
        for entry in [*policies, *tried]
        if entry.record.feasible is not False and entry.is_measured
    ]
    front = select_front(np.vstack([*seen, *means[len(mixtures) :]]))
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
    used = sorted({policy for m in [*mixtures, *(e.mixture for e in merges)] for policy in m})
    pairs = sorted({pair for e in merges for pair in combinations(sorted(e.mixture), 2)})
    terms = _compute_terms(mixtures, used, pairs)
    observed = _compute_terms([entry.mixture for entry in merges], used, pairs)
    # What the pairs that no measured merge has add to the variance.
    squares = (terms[:, : len(used)] ** 2).sum(axis=1)
    fourth = (terms[:, : len(used)] ** 4).sum(axis=1)
    others = 8 * (squares**2 - fourth) - (terms[:, len(used) + 1 :] ** 2).sum(axis=1)
    span = np.ptp([parent.losses for parent in parents], axis=0)
    means = np.empty((len(mixtures), len(span)))
    errors = np.empty_like(means)
    for column, width in enumerate(span):
        values = [ends[p].losses[column] if p in ends else np.nan for p in used]
        noise = [ends[p].errors[column] ** 2 if p in ends else 0.0 for p in used]
        prior = np.array([*values, -BUMP * width, *[0.0] * len(pairs)])
        own = (PAIR_SPREAD * width) ** 2
        variances = np.array([*noise, (SHARED_SPREAD * width) ** 2, *[own] * len(pairs)])
        means[:, column] = terms @ prior
        variance = (terms**2) @ variances + own * others
        if merges:
            cross = (terms * variances) @ observed.T
            inner = (observed * variances) @ observed.T
            inner += np.diag(
                [e.errors[column] ** 2 + (TINY * width) ** 2 + TINY**2 for e in merges]
            )
            rest = np.array([e.losses[column] for e in merges]) - observed @ prior
            gain = np.linalg.solve(inner, cross.T).T
            means[:, column] += gain @ rest
            variance -= (gain * cross).sum(axis=1)
        errors[:, column] = np.sqrt(np.maximum(variance, 0.0))
    return means, errors


def _compute_terms(
    mixtures: Sequence[Mixture], used: Sequence[Policy], pairs: Sequence[tuple[Policy, Policy]]
) -> Floats:
    """Compute the terms of the polynomial: weights, their shared bump, and each pair's bump."""
    terms = np.zeros((len(mixtures), len(used) + 1 + len(pairs)))
    places = {policy: place for place, policy in enumerate(used)}
    for row, mixture in zip(terms, mixtures, strict=True):
        for policy, weight in mixture.items():
            row[places[policy]] = weight
    weights = terms[:, : len(used)]
    terms[:, len(used)] = 2 * (1 - (weights**2).sum(axis=1))
    for place, (left, right) in enumerate(pairs, start=len(used) + 1):
        terms[:, place] = 4 * weights[:, places[left]] * weights[:, places[right]]
    return terms


def _select_parents(policies: Sequence[Evaluated]) -> list[Evaluated]:
    """Select at most `MOST_PARENTS` on the front or within an error of it, farthest apart first."""
    kept = [p for p in policies if p.record.feasible and p.record.checkpoint is not None]
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
    """List the merges that may come next: the middles of segments, and even or halved groups."""
    policies = [next(iter(parent.mixture)) for parent in parents]
    done = {_round(merge.mixture) for merge in tried}
    result: list[Mixture] = []
    for size in range(2, most_parts + 1):
        count = next(n for n in range(len(policies), -1, -1) if math.comb(n, size) <= MOST_GROUPS)
        for group in combinations(policies[:count], size):
            weights = _list_middles(group, done) if size == 2 else _list_centres(size)
            result += [dict(zip(group, each, strict=True)) for each in weights]
    return [mixture for mixture in result if _round(mixture) not in done]


def _list_middles(pair: tuple[Policy, ...], done: set[Rounded]) -> list[tuple[float, ...]]:
    """List the middles between neighbouring weights that a pair of parents has been tried with."""
    known = [
        step
        for step in range(FINEST + 1)
        if step in (0, FINEST)
        or _round(dict(zip(pair, (step / FINEST, 1 - step / FINEST), strict=True))) in done
    ]
    middles = [(a + b) // 2 for a, b in pairwise(known) if b - a > 1]
    return [(middle / FINEST, 1 - middle / FINEST) for middle in middles]


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
