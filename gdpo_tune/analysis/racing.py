"""Racing: which configuration to train again with a fresh seed, so that it decides most.

What a front claims is who is on it. So each further run goes to the configuration whose next seed
is expected to change most memberships, rivals just below the front included. Let a configuration
have n seeds and a mean with standard error s. Its next seed moves the mean by

    N(0, s^2 / (n + 1))

since with sigma^2 = n s^2 the noise of one seed, that seed is drawn from N(mean, s^2 + sigma^2) and
enters the mean of n + 1. Its value is the expected number of configurations that then come onto the
front or leave it, all others staying where they are.

Source: the idea of Frazier et al. 2008, A knowledge-gradient policy for sequential information
collection, with front membership as what is to be decided; compared with other rules in
docs/noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.analysis.pareto import Floats, losses
from gdpo_tune.analysis.replicates import Configuration, configurations, first_of, grouped
from gdpo_tune.core.trials import Objective, Replicate, TrialRecord

Flags = NDArray[np.bool_]

DRAWS = 500
"""Of the next seed, for each configuration."""
WORTHWHILE = 0.05
"""Memberships that a run has to change, in expectation, to be spent below the front."""
LIKELY = 0.01
"""Probability of being on the front below which nothing is worth a run."""


def next_replicate(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], per_point: int, max_runs: int
) -> Replicate | None:
    """Which configuration to train again with a fresh seed; None when there is none.

    The one whose next seed decides most, by the head of this module; of equal ones the one with the
    fewest seeds, then the earlier. Members of the front are trained again up to the limits, others
    while that is `WORTHWHILE`. Replicates on their way count as seeds that changed nothing.

    Args:
        records: every trial; replicates in any state count against both limits, failed ones too,
            so that a configuration that keeps crashing does not use up the machine.
        objectives: what the front is over.
        per_point: replicates of one configuration.
        max_runs: replicates of the whole sweep.
    """
    if sum(record.role == "replicate" for record in records) >= max_runs:
        return None
    groups = {first_of(members).number: members for members in grouped(records).values()}
    rivals = [
        c for c in configurations(records, objectives) if c.on_front or c.probability > LIKELY
    ]
    coming = [sum(record.state == "running" for record in groups[c.first]) for c in rivals]
    values = decisiveness(
        [c.values(objectives) for c in rivals],
        [
            np.array(c.errors(objectives)) * math.sqrt(c.seeds / (c.seeds + more))
            for c, more in zip(rivals, coming, strict=True)
        ],
        [c.seeds + more for c, more in zip(rivals, coming, strict=True)],
        objectives,
    )

    def order(index: int) -> tuple[float, int, int]:
        seeds = rivals[index].seeds + coming[index]
        return (-round(float(values[index]), 6), seeds, rivals[index].first)

    allowed = [
        index
        for index, rival in enumerate(rivals)
        if rival.on_front or values[index] >= WORTHWHILE
        if sum(record.role == "replicate" for record in groups[rival.first]) < per_point
    ]
    if not allowed:
        return None
    chosen: Configuration = rivals[min(allowed, key=order)]
    return Replicate(of=chosen.first, params=chosen.params)


def decisiveness(
    means: ArrayLike, errors: ArrayLike, seeds: Sequence[int], objectives: Sequence[Objective]
) -> Floats:
    """Expected changes of membership by one more seed of each of T points, `float[T]`.

    Args:
        means: `[T, M]`, finite.
        errors: `[T, M]`, their standard errors.
        seeds: that each mean is over.
        objectives: M of them.
    """
    points = losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    noise = np.random.default_rng(0).standard_normal((DRAWS, len(objectives)))
    dominates = _dominates(points)
    dominators = dominates.sum(axis=0)
    front = dominators == 0
    result = np.zeros(len(points))
    for index, point in enumerate(points):
        moved = point + spread[index] / math.sqrt(seeds[index] + 1) * noise
        # Only this one moves, and whom it can push out or lets in is on the front without it.
        rest = dominators == dominates[index]
        rest[index] = False
        near = rest & _within_reach(points, moved)
        inside, leading = _memberships(moved, points[near])
        changes = (inside != front[index]).astype(float) + (leading != front[near]).sum(axis=1)
        result[index] = changes.mean() + np.count_nonzero(rest & ~near & ~front)
    return result


def _dominates(points: Floats) -> Flags:
    """Which losses dominate which, `bool[T, T]`: the row the column."""
    no_worse = np.ones((len(points), len(points)), dtype=np.bool_)
    for values in points.T:
        no_worse &= values[:, None] <= values
    return no_worse & ~no_worse.T


def _within_reach(points: Floats, moved: Floats) -> Flags:
    """Which losses could dominate, or be dominated by, one of the places `[D, M]`, `bool[T]`."""
    before = (points <= moved.max(axis=0)).all(axis=1)
    behind = (points >= moved.min(axis=0)).all(axis=1)
    return before | behind


def _memberships(moved: Floats, rest: Floats) -> tuple[Flags, Flags]:
    """Who is on the front once a point lies at each of D places `[D, M]`, beside a front `[F, M]`.

    Returns:
        Whether the point is, `bool[D]`, and whether each of the others still is, `bool[D, F]`.
    """
    # An objective at a time: numpy is slow at reducing an axis as short as M.
    below = np.ones((len(moved), len(rest)), dtype=np.bool_)
    above = below.copy()
    for places, values in zip(moved.T, rest.T, strict=True):
        below &= values <= places[:, None]
        above &= values >= places[:, None]
    return ~np.any(below & ~above, axis=1), ~(above & ~below)
