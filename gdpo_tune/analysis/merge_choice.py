"""Merging: the choice of the merge whose evaluation is expected to add most hypervolume.

`merge_model.py` predicts merges, with an error. What each is expected to add to the front follows
in closed form. Only validation values count: test values are left to what is claimed in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from gdpo_tune.analysis.expected_gains import TINY, compute_expected_gains
from gdpo_tune.analysis.merge_model import (
    Evaluated,
    Mixture,
    Policy,
    predict_losses,
    read_evaluated,
)
from gdpo_tune.analysis.pareto import (
    compute_loss_hypervolume,
    convert_references,
    mark_front,
    select_front,
)
from gdpo_tune.core.trials import Objective, Part, TrialRecord

Rounded = frozenset[tuple[Policy, float]]
"""A mixture by which equal ones are found."""

MOST_PARENTS = 24
"""Parents considered, spread evenly over the front: keeps a thousand trials cheap."""
MOST_GROUPS = 400
"""Groups of parents of one size considered, of those that lie farthest apart."""
WORTHWHILE = 0.001
"""Share of the hypervolume that a merge must be expected to add."""
MOST_FAILURES = 2
"""Merges that fail before a policy that they share counts as damaged."""
NEAR = 1.0
"""Standard errors by which a parent may trail the front in every objective."""


def choose_merge(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], most_parts: int
) -> tuple[Part, ...] | None:
    """Choose the merge that is expected to add most hypervolume on validation prompts.

    Parents are the ends and checkpoints of trainings that were kept, even if they break a
    constraint: a merge of them may meet it. Merges in any state count as tried. One that runs
    counts as if it had its predicted values, so that merges that run together differ. Equal records
    give an equal choice.

    Returns:
        Its parts by trial and step, or None if no merge is expected to add `WORTHWHILE`.
    """
    goals = tuple(objectives)
    known = read_evaluated(records, goals)
    policies = [entry for entry in known if entry.is_measured and len(entry.mixture) == 1]
    tried = [entry for entry in known if len(entry.mixture) > 1]
    failed = [
        policy for merge in tried if merge.record.state == "failed" for policy in merge.mixture
    ]
    measured = {policy for merge in tried if merge.is_measured for policy in merge.mixture}
    damaged = {p for p in failed if failed.count(p) >= MOST_FAILURES and p not in measured}
    parents = select_parents([p for p in policies if damaged.isdisjoint(p.mixture)])
    # `keep: front` has deleted policies of a sweep that is extended.
    kept = {p for entry in policies if entry.record.checkpoint is not None for p in entry.mixture}
    mixtures = _list_mixtures(parents, tried, kept, most_parts)
    if not mixtures:
        return None
    seen = [
        entry
        for entry in [*policies, *tried]
        if entry.record.feasible is not False and (entry.is_measured or entry.record.is_open)
    ]
    predicted = [*mixtures, *(entry.mixture for entry in seen)]
    means, errors = predict_losses(predicted, parents, [*policies, *tried])
    front = select_front(means[len(mixtures) :])
    gains = compute_expected_gains(
        means[: len(mixtures)], errors[: len(mixtures)], front, convert_references(goals)
    )
    best = int(np.argmax(np.round(gains, 12)))
    if gains[best] <= WORTHWHILE * compute_loss_hypervolume(front, goals):
        return None
    return tuple(Part(*policy, weight) for policy, weight in sorted(mixtures[best].items()))


def select_parents(policies: Sequence[Evaluated]) -> list[Evaluated]:
    """Select at most `MOST_PARENTS` on the front or within an error of it, farthest apart first.

    Only feasible ones form the front. Others join the selection where it does not dominate them.
    """
    kept = [policy for policy in policies if policy.record.checkpoint is not None]
    if not kept:
        return []
    losses, errors = np.array([p.losses for p in kept]), np.array([p.errors for p in kept])
    near = np.ones(len(kept), dtype=np.bool_)
    feasible = np.array([p.record.feasible is not False for p in kept])
    for member in np.flatnonzero(mark_front(np.where(feasible[:, None], losses, np.nan))):
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
    parents: Sequence[Evaluated], tried: Sequence[Evaluated], kept: set[Policy], most_parts: int
) -> list[Mixture]:
    """List the merges of policies that are `kept` that may come next, none of them tried.

    They are the middles of two parents or of measured merges on the front, which bisects what was
    tried before, and groups of parents with even weights or half of the weight on one.
    """
    policies = [next(iter(parent.mixture)) for parent in parents]
    result: dict[Rounded, Mixture] = {}
    front = [m for m in _list_front_mixtures(parents, tried) if m.keys() <= kept]
    for left, right in combinations(front, 2):
        middle = {p: (left.get(p, 0.0) + right.get(p, 0.0)) / 2 for p in left | right}
        if len(middle) <= most_parts:
            result.setdefault(round_mixture(middle), middle)
    for size in range(3, most_parts + 1):
        for group in list_groups(policies, size):
            for weights in list_centres(size):
                mixture = dict(zip(group, weights, strict=True))
                result.setdefault(round_mixture(mixture), mixture)
    done = {round_mixture(merge.mixture) for merge in tried}
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


def list_groups(policies: Sequence[Policy], size: int) -> Iterator[tuple[Policy, ...]]:
    """Return the groups of so many policies, of the first ones alone: at most `MOST_GROUPS`."""
    count = next(n for n in range(len(policies), -1, -1) if math.comb(n, size) <= MOST_GROUPS)
    return combinations(policies[:count], size)


def list_centres(size: int) -> list[tuple[float, ...]]:
    """List equal weights, and those where one parent has half."""
    half, rest = 0.5, 0.5 / (size - 1)
    equal = (1 / size,) * size
    return [equal, *(tuple(half if i == j else rest for j in range(size)) for i in range(size))]


def round_mixture(mixture: Mixture) -> Rounded:
    """Return a mixture in a form in which equal ones are equal."""
    return frozenset((policy, round(weight, 6)) for policy, weight in mixture.items())
