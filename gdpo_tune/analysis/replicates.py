"""Configurations: trials with equal parameters, pooled over their seeds.

A checkpoint or a merge is a configuration of its own, pooled over the seeds of its parts.

Fronts are built from the mean over seeds of the test objectives. For one configuration with n
complete trials, means m_i and within-trial standard errors s_i (bootstrap clustered by prompt):

    mean = sum_i m_i / n
    se   = max( sqrt(var(m, ddof=1) / n),    the spread between its own seeds; n >= 2
                sqrt(sum_i s_i^2) / n,       the noise of its evaluations
                sigma / sqrt(n) )            the spread between seeds anywhere in the sweep

    sigma^2 = sum_c sum_i (m_ci - mean_c)^2 / df    over configurations c with n_c >= 2
    df      = sum_c (n_c - 1)

The interval at 95 % reaches to each side as far as the farthest of the same three: 1.96 times the
first, the root mean square of the evaluations' own reaches over sqrt(n), and t times the last, with
Student's t of df degrees of freedom.

Two or three seeds may agree by luck, and one seed says nothing about the noise of training. So no
configuration counts as less noisy than the seeds of the others. Until some configuration has two
seeds, sigma is unknown and counts as 0; the errors of `is_provisional` ones are then too small. The
untrained policy has no noise of training and no sigma, nor has a start, at which all begin.

All trials answer the same test prompts, and what the choice of prompts adds to s_i does not shrink
with more seeds: these errors are for comparing configurations, not for predicting other prompts. A
front member was selected because its first trial looked good, and that trial stays in the mean:
with few seeds the mean is a little too high.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gdpo_tune.analysis.pareto import NOT_RANKED, Floats, compute_losses, rank_points
from gdpo_tune.analysis.uncertainty import compute_quantile, estimate_front_probability
from gdpo_tune.core.trials import (
    Z_95,
    Estimate,
    Objective,
    Params,
    Part,
    Provenance,
    Replicate,
    Role,
    TrialRecord,
)

Key = tuple[object, ...]
Spread = tuple[float, int]
"""A standard deviation between seeds, and its degrees of freedom; 0 and 0 if it is unknown."""
Flags = NDArray[np.bool_]
DRAWS = 500
"""Draws of the next seed, for each configuration."""
WORTHWHILE = 0.05
"""Expected changes of membership that justify a run below the front."""
LIKELY = 0.01
"""Probability of being on the front above which a configuration below it is a rival."""


@dataclass(frozen=True)
class Configuration(Provenance):
    """One setting of the parameters with its results over all seeds."""

    numbers: tuple[int, ...]
    """The complete trials that were pooled, in order."""
    first: int
    """Number of the trial that first had these parameters."""
    name: str
    """Name of the candidate, see `TrialRecord.name`."""
    params: Params
    """Empty for a merge; those of its training for a checkpoint."""
    role: Role
    """`untrained`, `start`, `published`, `checkpoint`, `merge` or `search`; never `replicate`."""
    mean: Mapping[str, Estimate]
    """Test metric -> mean over seeds and its standard error; every metric that all seeds have."""
    validation: Mapping[str, Estimate]
    """Like `mean`, on validation prompts."""
    seeds: int
    feasible: bool
    rank: int
    """Non-dominated rank among feasible trained configurations; `NOT_RANKED` for the others."""
    probability: float
    """Probability of being on the front, given means and standard errors; 0 when not ranked."""
    parts: tuple[Part, ...] = ()
    """Trained policies that a checkpoint or a merge consists of, those of its first seed."""
    can_be_on_front: bool = True
    """False for what `is_eligible` leaves out."""

    @property
    def df(self) -> int:
        """Degrees of freedom of the spread between seeds in the errors of the objectives."""
        return max(estimate.df for estimate in self.mean.values())

    @property
    def is_on_front(self) -> bool:
        """True if no other feasible trained configuration dominates this one."""
        return self.rank == 0

    @property
    def is_provisional(self) -> bool:
        """True if there is only one seed, so that its own noise of training is unknown."""
        return self.seeds < 2

    def get_mean(self, metric: str) -> float:
        """Return the test mean of a metric; NaN if it was not measured."""
        return self.mean[metric].mean if metric in self.mean else math.nan

    def get_values(self, objectives: Sequence[Objective]) -> tuple[float, ...]:
        """Return the test means of the objectives, in their order."""
        return tuple(self.mean[objective.name].mean for objective in objectives)

    def get_errors(self, objectives: Sequence[Objective]) -> tuple[float, ...]:
        """Return the standard errors of `get_values`."""
        return tuple(self.mean[objective.name].se for objective in objectives)


def pool_trials(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> list[Configuration]:
    """Pool trials into configurations with at least one measured trial, ordered by `first`."""
    groups = group_trials(records)
    measured = {
        key: seeds
        for key, members in groups.items()
        if (seeds := [record for record in members if is_measured(record, objectives)])
    }
    trained = [seeds for seeds in measured.values() if not seeds[0].is_initial]
    test = estimate_seed_spread([[record.test for record in seeds] for seeds in trained])
    validation = estimate_seed_spread(
        [[record.validation for record in seeds] for seeds in trained]
    )
    pooled: list[Configuration] = []
    for key, seeds in measured.items():
        first = find_original(groups[key])
        published = any(record.role == "published" for record in groups[key])
        role: Role = "published" if published else "search"
        role = first.role if first.parts or first.is_initial else role
        noise = ({}, {}) if first.is_initial else (test, validation)
        pooled.append(
            Configuration(
                numbers=tuple(record.number for record in seeds),
                first=first.number,
                name=first.name,
                params=first.params,
                role=role,
                mean=_pool_metrics([record.test for record in seeds], noise[0]),
                validation=_pool_metrics([record.validation for record in seeds], noise[1]),
                seeds=len(seeds),
                feasible=is_feasible(seeds),
                rank=NOT_RANKED,
                probability=0.0,
                parts=first.parts,
                can_be_on_front=is_eligible(seeds),
            )
        )
    pooled.sort(key=lambda configuration: configuration.first)
    eligible = [c for c in pooled if c.can_be_on_front and not c.is_initial]
    means = np.array([c.get_values(objectives) for c in eligible])
    errors = np.array([c.get_errors(objectives) for c in eligible])
    df = max((c.df for c in eligible), default=0)
    ranks = rank_points(means, objectives)
    probabilities = estimate_front_probability(means, errors, objectives, df=df)
    ranked = {
        c.first: replace(c, rank=int(rank), probability=float(probability))
        for c, rank, probability in zip(eligible, ranks, probabilities, strict=True)
    }
    return [ranked.get(c.first, c) for c in pooled]


def group_trials(records: Iterable[TrialRecord]) -> dict[Key, list[TrialRecord]]:
    """Group trials with equal parameters, each replicate with its original, by trial number.

    The untrained policy and the start stand alone.
    """
    ordered = sorted(records, key=lambda record: record.number)
    by_number = {record.number: record for record in ordered}
    groups: dict[Key, list[TrialRecord]] = {}
    for record in ordered:
        original = record if record.replicate_of is None else by_number.get(record.replicate_of)
        original = original or record
        key: Key = tuple(sorted(original.params.items()))
        if original.is_initial:
            key = (original.role,)
        elif original.parts:
            key = (original.role, original.parts)
        groups.setdefault(key, []).append(record)
    return groups


def find_original(members: Sequence[TrialRecord]) -> TrialRecord:
    """Return the trial that the others repeat: the earliest that is not itself a replicate."""
    return next((record for record in members if record.role != "replicate"), members[0])


def is_measured(record: TrialRecord, objectives: Sequence[Objective]) -> bool:
    """Return whether a trial is complete, with finite test values of every objective."""
    return record.state == "complete" and all(
        goal.name in record.test and _is_finite(record.test[goal.name]) for goal in objectives
    )


def is_feasible(seeds: Sequence[TrialRecord]) -> bool:
    """Return whether more than half of the seeds satisfy the constraints.

    The majority decides, because records carry verdicts and not the constraints. A record without a
    verdict (no constraint was measured) counts as satisfied.
    """
    return 2 * sum(record.feasible is not False for record in seeds) > len(seeds)


def is_eligible(seeds: Sequence[TrialRecord]) -> bool:
    """Return whether a configuration is feasible and its trainings have changed the policy."""
    return is_feasible(seeds) and not all(record.is_unchanged for record in seeds)


def estimate_seed_spread(groups: Iterable[Sequence[Mapping[str, Estimate]]]) -> dict[str, Spread]:
    """Return metric -> sigma and df of the head of this module, where they are known."""
    squares: dict[str, float] = {}
    freedom: dict[str, int] = {}
    for seeds in groups:
        for name in seeds[0]:
            means = [seed[name].mean for seed in seeds if name in seed and _is_finite(seed[name])]
            if len(means) > 1:
                squares[name] = squares.get(name, 0.0) + float(np.var(means)) * len(means)
                freedom[name] = freedom.get(name, 0) + len(means) - 1
    return {n: (math.sqrt(squares[n] / freedom[n]), freedom[n]) for n in squares if squares[n]}


def pool_estimates(estimates: Sequence[Estimate], spread: Spread = (0.0, 0)) -> Estimate:
    """Return the mean over seeds, at least one, by the formulas at the head of this module."""
    count, (sigma, df) = len(estimates), spread
    if count == 1 and not df:  # nearly all of a large sweep
        return estimates[0]
    means = [estimate.mean for estimate in estimates]
    within = math.hypot(*(estimate.se for estimate in estimates)) / count
    between = float(np.std(means, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    of_sweep = sigma / math.sqrt(count)
    # From the first one on, so that equal seeds give exactly their value and ties stay ties.
    mean = means[0] + math.fsum(mean - means[0] for mean in means) / count
    reach = max(Z_95 * between, compute_quantile(df) * of_sweep)
    low = mean - max(reach, math.hypot(*(each.mean - each.low for each in estimates)) / count)
    high = mean + max(reach, math.hypot(*(each.high - each.mean for each in estimates)) / count)
    return Estimate(mean, max(between, within, of_sweep), low, high, df=df)


def _pool_metrics(
    seeds: Sequence[Mapping[str, Estimate]], spread: Mapping[str, Spread]
) -> dict[str, Estimate]:
    return {
        name: pool_estimates([seed[name] for seed in seeds], spread.get(name, (0.0, 0)))
        for name in seeds[0]
        if all(name in seed and _is_finite(seed[name]) for seed in seeds)
    }


def _is_finite(estimate: Estimate) -> bool:
    return math.isfinite(estimate.mean) and math.isfinite(estimate.se)


def choose_replicate(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], per_point: int, max_runs: int
) -> Replicate | None:
    """Choose the configuration to train again with a fresh seed; None if there is none.

    It is the one whose next seed is expected to change most memberships of the front, see
    `count_expected_changes`. Ties go to the fewest seeds, then to the earliest. Members of the
    front are trained again up to the limits, rivals below it only while that is `WORTHWHILE`.
    Running replicates count as seeds that changed nothing.

    The limits are `per_point` replicates of one configuration and `max_runs` trainings of the whole
    sweep, and as many fresh seeds of merges and checkpoints. Replicates in any state count, so that
    a configuration that keeps crashing does not use up the machine.

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
    allowed: list[tuple[float, int, int, int]] = []
    for rival, change, count in zip(rivals, changes, seeds, strict=True):
        # Of the parts of a candidate, the one with the fewest replicates is trained again.
        numbers = [part.trial for part in rival.parts] or [rival.first]
        fewest, number = min((len(copies.get(number, ())), number) for number in numbers)
        if fewest < per_point and (rival.is_on_front or change >= WORTHWHILE):
            allowed.append((-round(float(change), 6), count, rival.first, number))
    original = min(allowed)[-1] if allowed else None
    if original is None:
        return None
    params = next(record.params for record in records if record.number == original)
    return Replicate(original, params)


def _find_ready(
    rivals: Sequence[Configuration], copies: Mapping[int, Sequence[TrialRecord]], per_point: int
) -> Replicate | None:
    """Find a fresh seed of a merge or a checkpoint whose parts have been trained again."""
    for rival in rivals:
        turn = len(copies[rival.first])
        if not rival.parts or not rival.is_on_front or turn >= per_point:
            continue
        fresh: list[Part] = []
        for part in rival.parts:
            steps = {other.step for other in rival.parts if other.trial == part.trial}
            seeds = (r for r in copies.get(part.trial, ()) if r.state == "complete")
            usable = [r.number for r in seeds if steps <= {*r.policy_steps}]
            fresh += [replace(part, trial=number) for number in usable[turn : turn + 1]]
        if len(fresh) == len(rival.parts):
            return Replicate(rival.first, rival.params, tuple(fresh))
    return None


def count_expected_changes(
    means: ArrayLike, errors: ArrayLike, seeds: Sequence[int], objectives: Sequence[Objective]
) -> Floats:
    """Return the expected changes of membership by one more seed of each of T points, `float[T]`.

    `means` and `errors` are `[T, M]` and finite; `seeds` is the number of seeds of each mean. If a
    configuration has n seeds and a mean with standard error s, its next seed moves the mean by
    N(0, s^2 / (n + 1)): with sigma^2 = n s^2 the noise of one seed, that seed is drawn from
    N(mean, s^2 + sigma^2) and enters the mean of n + 1. A change is a configuration that then comes
    onto the front or leaves it, while all others stay where they are.

    Source: the idea of Frazier et al. 2008, A knowledge-gradient policy for sequential information
    collection, applied to front membership; docs/noise.md compares it with other rules.
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
        # An objective at a time: numpy is slow at reducing an axis as short as M.
        below = np.ones((len(moved), np.count_nonzero(near)), dtype=np.bool_)
        above = below.copy()
        for positions, values in zip(moved.T, points[near].T, strict=True):
            below &= values <= positions[:, None]
            above &= values >= positions[:, None]
        inside, others = ~np.any(below & ~above, axis=1), ~(above & ~below)
        changes = (inside != front[index]).astype(float) + (others != front[near]).sum(axis=1)
        result[index] = changes.mean() + np.count_nonzero(rest & ~near & ~front)
    return result
