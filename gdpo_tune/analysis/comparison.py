"""Differences between two searches, and their significance.

A search is compared by the configurations that it tried, without baselines. Each is one draw of
what that search does, with the noise of its training and its evaluation. The null hypothesis is
that both arms come from one distribution:

    p            two-sided, by 999 permutations of configurations over the arms. Exact for any
                 distribution and sizes, if configurations are drawn independently of one another;
                 docs/comparison.md measures it for a sampler with a model.
    intervals    500 bootstrap draws of configurations with replacement, each arm its own.
    correction   Holm over all tests of a page: the hypervolume, and each objective.

A larger search has a better front by its size alone. So hypervolumes are compared at the smaller
arm's number of configurations, as the mean over random choices of as many of the larger arm's. A
trial that was stopped at a rung or breaks a constraint counts as a configuration that adds nothing;
failed trials are left out. Objectives are compared over independent ones: see `build_arm`.

A configuration that was tried is a training with all candidates that are made of it: its end, its
checkpoints, and the merges in which it has the largest weight (the latest of equal ones). They
resemble one another, so they are drawn, permuted and counted together. Everything is seeded.
Shapes: P points, M objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_from

import moocore
import numpy as np
from numpy.typing import NDArray

from gdpo_tune.analysis.pareto import (
    Floats,
    compute_coverage,
    compute_loss_hypervolume,
    compute_losses,
    convert_references,
    is_inside,
    select_front,
)
from gdpo_tune.analysis.replicates import Configuration, find_original, group_trials, pool_trials
from gdpo_tune.analysis.uncertainty import (
    Interval,
    compute_interval,
    estimate_optimism,
    rank_values,
)
from gdpo_tune.core.trials import Z_95, Estimate, Objective, TrialRecord, find_main_part

ALPHA = 0.04
"""Corrected p up to which a difference is significant. Below the promised .05, because 999
permutations are not all, and a sampler's proposals are not quite independent."""

MAX_OPTIMISM = 2
"""True optimism over that which draws find, if all candidates are truly equal: docs/noise.md."""

Share = tuple[float, Interval]
"""A share and its interval."""
CHOICES = 200
"""Random choices of as many configurations as the smaller arm has."""
PERMUTATIONS = 999
"""With the observed one 1,000: the smallest p is .002, two-sided."""
RESAMPLES = 500
ROUNDING = 1e-9
"""Share of the largest value up to which values are equal."""
Indices = NDArray[np.int64]
Statistic = Callable[[Indices], Floats]
"""Permutations `[D, rows]`, the first group's rows first -> `[D]`, larger where it is ahead."""


@dataclass(frozen=True)
class Effect:
    """A difference between the arms."""

    value: float
    interval: Interval
    """Interval of `value`, at 95 %."""
    p: float
    corrected: float
    """`p`, corrected by Holm's rule."""


@dataclass(frozen=True)
class Comparison:
    """Differences between two searches."""

    left: Arm
    right: Arm
    count: int
    """Configurations at which hypervolumes are compared."""
    hypervolumes: tuple[float, float]
    ratio: Effect
    """Left over right hypervolume, each without its optimism."""
    probability_of_superiority: dict[str, Effect]
    """Objective -> chance that a configuration of the left arm is better than one of the right
    arm; ties count half. Empty if there are too few independent configurations for a difference to
    be significant."""
    best: dict[str, tuple[Estimate, Estimate]]
    """Objective -> the best feasible value of each arm; none while an arm has no value."""
    coverage: tuple[Share, Share]
    """Share of the right front that the left one matches or beats, and the reverse."""
    smallest_p: float
    """Smallest corrected p of the hypervolume that the numbers of trials allow."""
    least_size: int
    """Configurations of each arm from which a difference can be significant."""


def compare_arms(left: Arm, right: Arm) -> Comparison:
    """Compute every difference between two arms with equal objectives; arms may be empty."""
    goals = left.objectives
    count = min(left.tried_count, right.tried_count)
    ratio_p, *tests = compute_p_values(left, right)
    corrected = correct_p_values([ratio_p, *tests])
    hypervolumes = estimate_hypervolume_at(left, count), estimate_hypervolume_at(right, count)
    ours, theirs = hypervolumes
    ratio = _divide(ours * (1 - left.optimism), theirs * (1 - right.optimism))
    ratio_interval = _estimate_ratio_interval(left, right, count, ratio)
    tests_of_page = 1 + len(goals)
    sizes = len(left.independent), len(right.independent)
    ours, theirs = ([c.mean for c in arm.configurations if c.feasible] for arm in (left, right))
    best: dict[str, tuple[Estimate, Estimate]] = {}
    for goal in goals if ours and theirs else ():
        find = max if goal.direction == "maximize" else min
        first, second = (
            find((means[goal.name] for means in own), key=lambda value: value.mean)
            for own in (ours, theirs)
        )
        best[goal.name] = first, second
    return Comparison(
        left=left,
        right=right,
        count=count,
        hypervolumes=hypervolumes,
        ratio=Effect(ratio, ratio_interval, ratio_p, corrected[0]),
        probability_of_superiority={
            goal.name: Effect(
                *_compute_superiority(left, right, index), tests[index], corrected[1 + index]
            )
            for index, goal in enumerate(goals)
            if compute_smallest_p(*sizes) * tests_of_page <= ALPHA
        },
        best=best,
        coverage=_compare_fronts(left, right),
        smallest_p=min(
            1.0, compute_smallest_p(left.tried_count, right.tried_count) * tests_of_page
        ),
        least_size=next(
            n for n in count_from(1) if compute_smallest_p(n, n) <= ALPHA / tests_of_page
        ),
    )


def compute_p_values(left: Arm, right: Arm) -> list[float]:
    """Compute the p of the hypervolume and of each objective, before any correction."""
    objectives = [_test_objective(left, right, index) for index in range(len(left.objectives))]
    return [_test_hypervolume(left, right), *objectives]


def _test_hypervolume(left: Arm, right: Arm) -> float:
    both, reference = np.vstack([left.points, right.points]), convert_references(left.objectives)
    inside = is_inside(both, reference)
    points = both[inside]
    owners = np.array([*left.owners, *(left.tried_count + owner for owner in right.owners)])
    owners = owners[inside].astype(np.int64)
    measure = moocore.Hypervolume(ref=reference)

    def compute_leads(permutations: Indices) -> Floats:
        # Each training takes its candidates along.
        is_ours = np.argsort(permutations, axis=1)[:, owners] < left.tried_count
        groups = ((points[ours], points[~ours]) for ours in is_ours)
        volumes = [[float(measure(rows)) if len(rows) else 0.0 for rows in g] for g in groups]
        return np.array([ours - theirs for ours, theirs in volumes])

    ours, theirs = (
        arm.optimism * compute_loss_hypervolume(arm.points, arm.objectives) for arm in (left, right)
    )
    allowance = MAX_OPTIMISM * (ours - theirs)
    return compute_permutation_p(left.tried_count, right.tried_count, compute_leads, allowance)


def _test_objective(left: Arm, right: Arm, index: int) -> float:
    """Test the ranks of an objective among measured configurations (Mann and Whitney)."""
    ours, theirs = _get_losses(left, index), _get_losses(right, index)
    ranks = rank_values(np.concatenate([ours, theirs]))
    return compute_permutation_p(
        len(ours), len(theirs), lambda rows: -ranks[rows[:, : len(ours)]].sum(axis=1)
    )


def _compute_superiority(left: Arm, right: Arm, index: int) -> Share:
    ours, theirs = _get_losses(left, index), _get_losses(right, index)
    if not len(ours) or not len(theirs):
        return 0.5, Interval(0.0, 1.0)
    wins = (ours[:, None] < theirs[None, :]) + 0.5 * (ours[:, None] == theirs[None, :])
    draws = [float(wins[np.ix_(i, j)].mean()) for i, j in draw_resamples(len(ours), len(theirs))]
    return float(wins.mean()), compute_interval(draws)


def _get_losses(arm: Arm, index: int) -> Floats:
    goal = arm.objectives[index]
    return compute_losses([[c.mean[goal.name].mean] for c in arm.independent], [goal])[:, 0]


def _divide(left: float, right: float) -> float:
    if right > 0:
        return left / right
    return math.inf if left > 0 else math.nan


def _estimate_ratio_interval(left: Arm, right: Arm, count: int, ratio: float) -> Interval:
    """Return the bootstrap's spread around the observed ratio, on a log scale.

    Quantiles would be off: a front of configurations drawn again lies below the observed one, and
    not equally far on arms of different size. They serve where a front vanishes in some draws.
    """
    goals = left.objectives
    if math.isnan(ratio):
        return Interval(0.0, math.inf)
    draws = [
        _divide(
            compute_loss_hypervolume(left.get_points(ours), goals),
            compute_loss_hypervolume(right.get_points(theirs), goals),
        )
        for ours, theirs in draw_resamples(left.tried_count, right.tried_count, count)
    ]
    if not all(0 < draw < math.inf for draw in draws):
        interval = compute_interval(draws)
        return Interval(min(ratio, interval.low), max(ratio, interval.high))
    reach = math.exp(Z_95 * float(np.std(np.log(draws))))
    return Interval(ratio / reach, ratio * reach)


def _compare_fronts(left: Arm, right: Arm) -> tuple[Share, Share]:
    """Compute the coverage of the left arm and of the right one."""
    pairs = [(left.points, right.points)]
    if left.tried_count and right.tried_count:
        resamples = draw_resamples(left.tried_count, right.tried_count)
        pairs += [(left.get_points(ours), right.get_points(theirs)) for ours, theirs in resamples]
    fronts = [(select_front(ours), select_front(theirs)) for ours, theirs in pairs]
    return (
        _add_interval(*(compute_coverage(ours, theirs) for ours, theirs in fronts)),
        _add_interval(*(compute_coverage(theirs, ours) for ours, theirs in fronts)),
    )


def _add_interval(share: float, *draws: float) -> Share:
    """Add the interval of bootstrap draws, centred on the share.

    Fronts drawn again are a little worse, so they miss one another more often than observed ones.
    """
    shares = np.asarray(draws, dtype=np.float64)
    shares = shares[~np.isnan(shares)]
    if not shares.size or math.isnan(share):
        return share, Interval(0.0, 1.0)
    interval = compute_interval(shares + share - shares.mean())
    return share, Interval(min(share, max(0.0, interval.low)), max(share, min(1.0, interval.high)))


@dataclass(frozen=True)
class Arm:
    """Configurations and costs of one search."""

    name: str
    objectives: tuple[Objective, ...]
    configurations: tuple[Configuration, ...]
    """Candidates that were measured, feasible or not: ends, checkpoints and merges."""
    owners: tuple[int, ...]
    """Index of the training of each configuration, from 0."""
    trained: int
    independent: tuple[Configuration, ...]
    """Configurations whose values may be compared one by one: see `build_arm`."""
    stopped: int
    """Trainings that ended at a rung, without a configuration."""
    failed: int
    seconds: float
    """Wall time of all trials together, as are `completions`."""
    completions: int
    evaluations: int = 0
    """Trials that evaluated a checkpoint or a merge; each counts with its training."""

    @property
    def tried_count(self) -> int:
        """Number of trainings, measured or stopped."""
        return self.trained + self.stopped

    @cached_property
    def points(self) -> Floats:
        """Losses `[P, M]` of the configurations; a row of NaN for one that breaks a constraint."""
        rows = compute_losses(
            [c.get_values(self.objectives) for c in self.configurations], self.objectives
        )
        feasible = np.array([c.can_be_on_front for c in self.configurations], dtype=np.bool_)
        return np.where(feasible[:, None], rows, np.nan)

    @cached_property
    def _rows(self) -> list[Indices]:
        """Rows of `points` of each training; none for one that was stopped."""
        owners = np.array(self.owners, dtype=np.int64)
        return [np.flatnonzero(owners == index) for index in range(self.tried_count)]

    @property
    def front(self) -> Floats:
        """The non-dominated rows of `points`."""
        return select_front(self.points)

    def get_points(self, trainings: Indices) -> Floats:
        """Return the rows of `points` of some trainings, each as often as it is named."""
        rows = [self._rows[index] for index in trainings]
        return self.points[np.concatenate(rows)] if rows else self.points[:0]

    @cached_property
    def optimism(self) -> float:
        """Share of the hypervolume by which it is too high, see `estimate_optimism`; 0 of none."""
        kept = [c for c in self.configurations if c.can_be_on_front]
        values = [c.get_values(self.objectives) for c in kept]
        errors = [c.get_errors(self.objectives) for c in kept]
        hypervolume = compute_loss_hypervolume(self.points, self.objectives)
        optimism = estimate_optimism(values, errors, self.objectives)
        return min(1.0, optimism / hypervolume) if hypervolume > 0 else 0.0


def build_arm(
    name: str,
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    *,
    shared: bool = False,
) -> Arm:
    """Build an arm from the trials of a search, without the baselines, which no search proposed.

    `shared` is True if the other arm's trials come from the same sweep. Then only configurations
    that no model proposed are independent: a model tries more of a mode in a corner of the space
    where that mode looked good, which says nothing about the mode.
    """
    kept = [r for r in records if not r.is_initial and r.role != "published"]
    goals = tuple(objectives)
    trainings = {
        record.number: find_original(seeds).number
        for seeds in group_trials(r for r in kept if r.is_training).values()
        for record in seeds
    }
    # A merge with a baseline, or with another search, is not what this search does.
    measured = [
        c for c in pool_trials(kept, goals) if all(part.trial in trainings for part in c.parts)
    ]
    owners = [trainings[find_main_part(c.parts).trial if c.parts else c.first] for c in measured]
    order = {number: index for index, number in enumerate(dict.fromkeys(owners))}
    stopped = {
        trainings[r.number]
        for r in kept
        if r.state == "pruned" and r.role != "replicate"
        if r.number in trainings
    }
    modelled = {record.number for record in kept if record.proposer == "model"}
    return Arm(
        name=name,
        objectives=goals,
        configurations=tuple(measured),
        owners=tuple(order[number] for number in owners),
        trained=len(order),
        independent=tuple(
            c for c in measured if c.is_training and not (shared and c.first in modelled)
        ),
        stopped=len(stopped - order.keys()),
        failed=sum(record.state == "failed" and record.is_training for record in kept),
        seconds=sum(record.cost.seconds for record in kept),
        completions=sum(record.cost.completions for record in kept),
        evaluations=sum(bool(record.parts) for record in records),
    )


def estimate_hypervolume_at(arm: Arm, count: int) -> float:
    """Estimate the mean hypervolume of `count` configurations of an arm."""
    if count == arm.tried_count:
        return compute_loss_hypervolume(arm.points, arm.objectives)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(arm.tried_count)[:count] for _ in range(CHOICES)]
    return float(
        np.mean([compute_loss_hypervolume(arm.get_points(c), arm.objectives) for c in chosen])
    )


def compute_permutation_p(
    left: int, right: int, statistic: Statistic, allowance: float = 0.0
) -> float:
    """Return the two-sided p of a difference between groups: twice the smaller tail, at most 1.

    The first group has the rows 0 to left - 1, the second group the `right` rows after them.
    `allowance` is how much of the observed value may come from optimism that permutations share
    out, negative if the second group had it. It brings the observed value closer to the middle of
    the permutations, never beyond.

    Source: Phipson and Smyth 2010, Permutation p-values should never be zero.
    """
    if left == 0 or right == 0:
        return 1.0
    rows = np.tile(np.arange(left + right), (PERMUTATIONS + 1, 1))
    rows[1:] = np.random.default_rng(0).permuted(rows[1:], axis=1)
    values = statistic(rows)
    lead = values[0] - np.median(values)
    if lead * allowance > 0:
        values[0] -= math.copysign(min(abs(lead), abs(allowance)), lead)
    # Equal up to rounding is equal: sums in another order differ in the last bits.
    close = ROUNDING * np.abs(values).max()
    above, below = (values >= values[0] - close).mean(), (values <= values[0] + close).mean()
    return float(min(1.0, 2 * min(above, below)))


def compute_smallest_p(left: int, right: int) -> float:
    """Return the smallest p that groups of these sizes can have; 1 if one of them is empty."""
    if left == 0 or right == 0:
        return 1.0
    ways = np.prod([(right + i) / i for i in range(1, left + 1)])
    return float(min(1.0, max(2 / ways, 2 / (PERMUTATIONS + 1))))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, so that the chance of any false one stays at alpha.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values, kind="stable")
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[int(index)] = highest
    return corrected


def draw_resamples(
    left: int, right: int, size: int | None = None
) -> Iterator[tuple[Indices, Indices]]:
    """Draw `RESAMPLES` pairs of rows with replacement, each group's rows counted from 0.

    Each group has at least one row. `size` rows are drawn of each; None draws as many as it has.
    """
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield rng.integers(left, size=size or left), rng.integers(right, size=size or right)
