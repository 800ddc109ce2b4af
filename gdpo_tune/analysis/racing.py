"""Racing: the choice of the configuration whose next seed changes the front most.

A front claims which configurations are its members. So each further run goes to the configuration
whose next seed is expected to change most memberships, rivals just below the front included. If a
configuration has n seeds and a mean with standard error s, its next seed moves the mean by

    N(0, s^2 / (n + 1))

since with sigma^2 = n s^2 the noise of one seed, that seed is drawn from N(mean, s^2 + sigma^2) and
enters the mean of n + 1. The value of the run is the expected number of configurations that then
come onto the front or leave it, while all others stay where they are.

Source: the idea of Frazier et al. 2008, A knowledge-gradient policy for sequential information
collection, applied to front membership; docs/noise.md compares it with other rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.analysis.pareto import Floats, compute_losses
from gdpo_tune.analysis.replicates import Configuration, find_original, group_trials, pool_trials
from gdpo_tune.core.trials import Objective, Replicate, TrialRecord

Flags = NDArray[np.bool_]

DRAWS = 500
"""Draws of the next seed, for each configuration."""
WORTHWHILE = 0.05
"""Expected changes of membership that justify a run below the front."""
LIKELY = 0.01
"""Probability of being on the front above which a configuration below it is a rival."""


def choose_replicate(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], per_point: int, max_runs: int
) -> Replicate | None:
    """Choose the configuration to train again with a fresh seed; None if there is none.

    It is the one whose next seed changes most, by the head of this module. Ties go to the fewest
    seeds, then to the earliest. Members of the front are trained again up to the limits, rivals
    only while that is `WORTHWHILE`. Running replicates count as seeds that changed nothing.

    The limits are `per_point` replicates of one configuration and `max_runs` trainings of the whole
    sweep, and as many fresh seeds of merges and checkpoints. Replicates in any state count, failed
    ones too, so that a configuration that keeps crashing does not use up the machine.

    A fresh seed of a merge or a checkpoint consists of fresh seeds of its parts. Where those exist,
    it comes first, because it costs no training; where not, one of its parts is trained again.
    """
    groups = {find_original(members).number: members for members in group_trials(records).values()}
    rivals = [
        c for c in pool_trials(records, objectives) if c.is_on_front or c.probability > LIKELY
    ]
    # A configuration may have been trained under several numbers.
    copies = {
        record.number: [member for member in members if member.role == "replicate"]
        for members in groups.values()
        for record in members
    }
    evaluated_again = sum(record.role == "replicate" and bool(record.parts) for record in records)
    ready = _find_ready(rivals, copies, per_point)
    if ready is not None and evaluated_again < max_runs:
        return ready
    if sum(record.role == "replicate" and not record.parts for record in records) >= max_runs:
        return None
    seeds = [c.seeds + sum(r.state == "running" for r in groups[c.first]) for c in rivals]
    changes = count_expected_changes(
        [c.get_values(objectives) for c in rivals],
        [
            np.array(c.get_errors(objectives)) * math.sqrt(c.seeds / count)
            for c, count in zip(rivals, seeds, strict=True)
        ],
        seeds,
        objectives,
    )
    trained = [_find_trained(rival, copies, per_point) for rival in rivals]
    allowed = [
        index
        for index, rival in enumerate(rivals)
        if rival.is_on_front or changes[index] >= WORTHWHILE
        if trained[index] is not None
    ]
    if not allowed:
        return None
    best = min(allowed, key=lambda i: (-round(float(changes[i]), 6), seeds[i], rivals[i].first))
    original = trained[best]
    assert original is not None, "it is allowed"
    return Replicate(original=original, params=records[original].params)


def _find_ready(
    rivals: Sequence[Configuration], copies: Mapping[int, Sequence[TrialRecord]], per_point: int
) -> Replicate | None:
    """Return a fresh seed of a candidate on the front whose parts all have one more seed."""
    for rival in rivals:
        turn = len(copies[rival.first])
        if not rival.parts or not rival.is_on_front or turn >= per_point:
            continue
        trials = {part.trial for part in rival.parts}
        found = {number: _find_copy(rival, number, copies, turn) for number in trials}
        fresh = [
            replace(part, trial=copy.number)
            for part in rival.parts
            if (copy := found[part.trial]) is not None
        ]
        if len(fresh) == len(rival.parts):
            return Replicate(rival.first, rival.params, tuple(fresh))
    return None


def _find_copy(
    rival: Configuration, number: int, copies: Mapping[int, Sequence[TrialRecord]], turn: int
) -> TrialRecord | None:
    """Return replicate number `turn`, from 0, of a trial that has the policies of all its parts."""
    steps = {part.step for part in rival.parts if part.trial == number}
    usable = [
        record
        for record in copies.get(number, ())
        if record.state == "complete" and steps <= {*record.policy_steps}
    ]
    return usable[turn] if turn < len(usable) else None


def _find_trained(
    rival: Configuration, copies: Mapping[int, Sequence[TrialRecord]], per_point: int
) -> int | None:
    """Return the trial to train again for a configuration; None if none may be.

    Of the parts of a candidate it is the one with the fewest replicates.
    """
    numbers = [part.trial for part in rival.parts] or [rival.first]
    fewest, number = min((len(copies.get(number, ())), number) for number in numbers)
    return number if fewest < per_point else None


def count_expected_changes(
    means: ArrayLike, errors: ArrayLike, seeds: Sequence[int], objectives: Sequence[Objective]
) -> Floats:
    """Return the expected changes of membership by one more seed of each of T points, `float[T]`.

    Args:
        means: `[T, M]`, finite.
        errors: `[T, M]`, their standard errors.
        seeds: number of seeds of each mean.
        objectives: directions of the M columns.
    """
    points = compute_losses(means, objectives)
    spread = np.asarray(errors, dtype=np.float64).reshape(points.shape)
    noise = np.random.default_rng(0).standard_normal((DRAWS, len(objectives)))
    no_worse = (points[:, None] <= points).all(axis=2)
    dominates: Flags = np.logical_and(no_worse, ~no_worse.T)  # the row dominates the column
    dominators = dominates.sum(axis=0)
    front = dominators == 0
    result = np.zeros(len(points))
    for index, point in enumerate(points):
        moved = point + spread[index] / math.sqrt(seeds[index] + 1) * noise
        # Only this point moves, so only points that are on the front without it can change.
        rest = dominators == dominates[index]
        rest[index] = False
        # Points that could dominate a position, or be dominated by one.
        before = (points <= moved.max(axis=0)).all(axis=1)
        behind = (points >= moved.min(axis=0)).all(axis=1)
        near = rest & (before | behind)
        inside, others = _find_memberships(moved, points[near])
        changes = (inside != front[index]).astype(float) + (others != front[near]).sum(axis=1)
        result[index] = changes.mean() + np.count_nonzero(rest & ~near & ~front)
    return result


def _find_memberships(moved: Floats, rest: Floats) -> tuple[Flags, Flags]:
    """Find the members for each of D positions `[D, M]` of a point beside a front `[F, M]`.

    Returns:
        True where the point is on the front, `bool[D]`, and where each other point still is,
        `bool[D, F]`.
    """
    # An objective at a time: numpy is slow at reducing an axis as short as M.
    below = np.ones((len(moved), len(rest)), dtype=np.bool_)
    above = below.copy()
    for positions, values in zip(moved.T, rest.T, strict=True):
        below &= values <= positions[:, None]
        above &= values >= positions[:, None]
    return ~np.any(below & ~above, axis=1), ~(above & ~below)
