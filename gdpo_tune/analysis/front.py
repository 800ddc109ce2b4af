"""The front of a sweep: its members, knee, extremes and origins, and how a member was trained.

Shapes: T points, M objectives; `values[T, M]` are finite and in the units of the objectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from gdpo_tune.analysis.pareto import (
    Floats,
    compute_hypervolume,
    compute_loss_hypervolume,
    compute_losses,
    select_front,
)
from gdpo_tune.analysis.replicates import (
    Configuration,
    Key,
    group_trials,
    is_eligible,
    is_measured,
    pool_estimates,
    pool_trials,
)
from gdpo_tune.analysis.uncertainty import (
    Interval,
    compute_quantile,
    draw_points,
    estimate_hypervolume_interval,
)
from gdpo_tune.core.text import format_first
from gdpo_tune.core.trials import Z_95, Cost, Estimate, Objective, TrialRecord, sum_costs

Kind = Literal["ends", "checkpoints", "merges"]
KINDS: tuple[Kind, ...] = ("ends", "checkpoints", "merges")
MIN_MOVE = 0.01
"""Share of the hypervolume that a move has to exceed."""
MOVE_DRAWS = 200
"""Draws of all means that tell the noise of a move."""


class HypervolumePoint(NamedTuple):
    """The hypervolume after a trial ended."""

    number: int
    hypervolume: float


@dataclass(frozen=True)
class Front:
    """The non-dominated configurations of a sweep, on test prompts, and their context."""

    objectives: tuple[Objective, ...]
    records: tuple[TrialRecord, ...]
    configurations: tuple[Configuration, ...]
    """Every measured configuration, dominated and infeasible ones and baselines included."""
    members: tuple[Configuration, ...]
    """Configurations on the front, best in the first objective first."""
    baselines: tuple[Configuration, ...]
    """The untrained policy, the start and the published weights, as far as measured."""
    knee: Configuration | None
    """The best compromise, see `choose_knee`; None while the front is empty."""
    extremes: dict[str, Configuration]
    """Objective -> the member that is best in it; empty while the front is empty."""
    hypervolume: float
    """Hypervolume of the front, against the objectives' fixed references."""
    chosen: Configuration | None = None
    """The configuration that a person picked, on the front or not."""
    missed: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Name of a member -> limits that its values on test prompts break, such as `length >= 0.9`."""

    @cached_property
    def trial_numbers(self) -> frozenset[int]:
        """Numbers of all trials of the members."""
        return frozenset(number for member in self.members for number in member.numbers)

    @cached_property
    def hypervolume_over_trials(self) -> tuple[HypervolumePoint, ...]:
        """The hypervolume after each trial that ended, in order of ending.

        The untrained policy has none. Each point is over the means of the seeds so far: the curve
        falls where a replicate shows that a first trial was lucky, and it ends at
        `compute_hypervolume`.
        """
        goals, groups = self.objectives, group_trials(self.records)
        key_of = {r.number: key for key, members in groups.items() for r in members}
        ended = [r for r in self.records if not r.is_initial and r.finished is not None]
        ended.sort(key=lambda record: (record.finished or math.inf, record.number))
        seeds: dict[Key, list[TrialRecord]] = {}
        points: dict[Key, tuple[float, ...]] = {}
        front = compute_losses([], goals)
        value = 0.0
        trace: list[HypervolumePoint] = []
        for record in ended:
            if is_measured(record, goals):
                key = key_of[record.number]
                trials = seeds.setdefault(key, [])
                trials.append(record)
                before, now = points.pop(key, None), None
                if is_eligible(trials):
                    now = points[key] = tuple(
                        pool_estimates([trial.test[goal.name] for trial in trials]).mean
                        for goal in goals
                    )
                if before is not None:  # the point moved or went, and may have been on the front
                    front = select_front(compute_losses(list(points.values()), goals))
                    value = compute_loss_hypervolume(front, goals)
                elif now is not None:
                    point = compute_losses([now], goals)
                    # Most points lie behind the front, so thousands of trials stay cheap.
                    if not (front <= point).all(axis=1).any():
                        front = select_front(np.concatenate([front, point]))
                        value = compute_loss_hypervolume(front, goals)
            trace.append(HypervolumePoint(record.number, value))
        return tuple(trace)

    @cached_property
    def hypervolume_interval(self) -> Interval:
        """The interval of the true hypervolume; rivals just below the front count too."""
        return estimate_hypervolume_interval(
            [c.get_values(self.objectives) for c in self._rankable],
            [c.get_errors(self.objectives) for c in self._rankable],
            self.objectives,
            df=max((c.df for c in self._rankable), default=0),
        )

    def list_labels(self, configuration: Configuration, *, ties: bool = False) -> list[str]:
        """Return why a configuration stands out: `chosen`, `knee`, `best correctness`, ...

        With `ties` an extreme names the candidates that it is tied with: `best correctness (tied
        with 5, 15)`.
        """
        names = ["chosen"] if configuration is self.chosen else []
        names += ["knee"] if configuration is self.knee else []
        for goal in self.objectives:
            if self.extremes.get(goal.name) is configuration:
                tied = [c.name for c in self.list_ties(goal.name)] if ties else []
                more = f" (tied with {format_first(tied, 3)})" if tied else ""
                names.append(name_extreme(goal) + more)
        return names

    def list_ties(self, objective: str) -> list[Configuration]:
        """Return the configurations that differ from the extreme by no more than noise.

        Dominated ones too, the closest first. The extreme of T configurations was found by looking,
        so the noise is that of all pairs in all objectives.
        """
        best = self.extremes[objective]
        top = best.mean[objective]
        others = [c for c in self._rankable if c is not best]
        goals = [goal for goal in self.objectives if goal.name == objective]
        pairs = len(self.objectives) * math.comb(len(others) + 1, 2)
        tied = [c for c in others if not list_regressions(c, best, goals, comparisons=pairs)]
        return sorted(tied, key=lambda c: abs(c.mean[objective].mean - top.mean))

    def find_shortfalls(self, configuration: Configuration) -> dict[str, list[str]]:
        """Return role of a baseline -> objectives in which a configuration is clearly worse.

        A baseline on the front is left out: there every other member is worse in some objective.
        """
        found = {
            baseline.role: self.list_clearly_worse(configuration, baseline)
            for baseline in self.baselines
            if not baseline.is_on_front
        }
        return {role: names for role, names in found.items() if names}

    def list_clearly_worse(self, one: Configuration, other: Configuration) -> list[str]:
        """Return where one is worse than another, one of them a baseline, by more than noise.

        Of sweeps whose policies are all equal, at most 5 % have any such objective.
        """
        return list_regressions(one, other, self.objectives, comparisons=self.comparisons)

    @property
    def comparisons(self) -> int:
        """Number of differences between a policy and a baseline in an objective.

        A policy that is put forward is the best of many, so what is said of it has to hold for all.
        """
        return len(self.objectives) * len(self.baselines) * len(self.configurations)

    @cached_property
    def knee_shortfall(self) -> list[str]:
        """Objectives in which the knee is worse than the untrained policy."""
        untrained = find_untrained(self.baselines)
        if self.knee is None or untrained is None:
            return []
        return list_regressions(self.knee, untrained, self.objectives)

    @property
    def _rankable(self) -> list[Configuration]:
        return [c for c in self.configurations if c.rank >= 0]


def choose_knee(
    members: Sequence[Configuration],
    baselines: Iterable[Configuration],
    objectives: Sequence[Objective],
) -> Configuration | None:
    """Choose the best compromise among members that keep what the untrained policy has.

    They are those that are worse than it in no objective; where there is none, those that are worse
    by no more than noise; where there is none either, all. None if there are no members.
    """
    baselines = tuple(baselines)
    grades = [grade_against_untrained(member, baselines, objectives) for member in members]
    best = max([1, *grades])
    keeping = [grade >= best for grade in grades]
    index = find_knee([m.get_values(objectives) for m in members], objectives, keeping)
    return None if index is None else members[index]


def grade_against_untrained(
    member: Configuration, baselines: Iterable[Configuration], objectives: Sequence[Objective]
) -> int:
    """Grade how far a member keeps what the untrained policy has.

    2: it is worse in no objective; 1: by no more than noise; 0: clearly worse in some, or the
    untrained policy was not measured.
    """
    untrained = find_untrained(baselines)
    if untrained is None:
        return 0
    worse = (list_regressions(member, untrained, objectives, comparisons=n) for n in (1, None))
    return sum(not names for names in worse)


def find_untrained(configurations: Iterable[Configuration]) -> Configuration | None:
    """Find the untrained policy; None if it was not measured."""
    return next((c for c in configurations if c.role == "untrained"), None)


def list_regressions(
    one: Configuration,
    other: Configuration,
    objectives: Sequence[Objective],
    *,
    comparisons: int | None = None,
) -> list[str]:
    """Return the objectives in which one is worse: at all, or by more than the noise of so many."""
    worse: list[str] = []
    for goal in objectives:
        low, high = one.mean[goal.name], other.mean[goal.name]
        if goal.direction == "minimize":
            low, high = high, low
        if is_above(high, low, comparisons) if comparisons else high.mean > low.mean:
            worse.append(goal.name)
    return worse


def find_configuration(
    configurations: Iterable[Configuration], name: str | None
) -> Configuration | None:
    """Find the configuration of that name, or with a trial of that number; None for no name."""
    return next((c for c in configurations if name in (c.name, *map(str, c.numbers))), None)


def name_extreme(objective: Objective) -> str:
    """Return `best correctness`."""
    return f"best {objective.name.replace('_', ' ')}"


def build_front(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], chosen: str | None = None
) -> Front:
    """Build the front of all complete trials, empty if there are none.

    `chosen` is the name of the candidate that a person picked, or the number of one of its trials.
    """
    goals = tuple(objectives)
    measured = tuple(pool_trials(records, goals))
    sign = -1.0 if goals[0].direction == "maximize" else 1.0
    members = tuple(
        sorted((c for c in measured if c.is_on_front), key=lambda c: sign * c.get_values(goals)[0])
    )
    values = [member.get_values(goals) for member in members]
    baselines = tuple(c for c in measured if c.is_initial or c.role == "published")
    return Front(
        objectives=goals,
        records=tuple(records),
        configurations=measured,
        members=members,
        baselines=baselines,
        knee=choose_knee(members, baselines, goals),
        extremes={name: members[index] for name, index in find_extremes(values, goals).items()},
        hypervolume=compute_hypervolume(values, goals),
        chosen=find_configuration(measured, chosen),
    )


def find_knee(
    values: ArrayLike, objectives: Sequence[Objective], preferred: Sequence[bool] = ()
) -> int | None:
    """Return the index of the best compromise of a front; None for an empty front.

    The knee has the smallest sum of scaled losses among the points that are no extremes, or among
    all points if all are. For two objectives that is the point farthest below the line between the
    extremes; for more, farthest along the equal-weights normal. Ties go to the smaller worst loss,
    then to the first point. An objective in which all points agree does not count. Points that are
    `preferred` (`bool[T]`; empty: none are) come before all others.

    Source: Das 1999, On characterizing the "knee" of the Pareto curve based on normal-boundary
    intersection; Branke et al. 2004, Finding knees in multi-objective optimization.
    """
    scaled = _scale_losses(values, objectives)
    if len(scaled) == 0:
        return None
    ends = set(find_extremes(values, objectives).values())
    inner = np.array([index not in ends for index in range(len(scaled))]) | (
        len(ends) == len(scaled)
    )
    # Rounded, so that sums that differ in the last bit alone are the ties that they should be.
    others = ~np.array(preferred or [False] * len(scaled))
    order = np.lexsort((scaled.max(axis=1), scaled.sum(axis=1).round(9), ~inner, others))
    return int(order[0])


def find_extremes(values: ArrayLike, objectives: Sequence[Objective]) -> dict[str, int]:
    """Return objective name -> index of the best point in it; empty for an empty front.

    Ties go to the point that is better in the other objectives, then to the first.
    """
    scaled = _scale_losses(values, objectives)
    if len(scaled) == 0:
        return {}
    return {
        objective.name: find_smallest(column, values, objectives)
        for objective, column in zip(objectives, scaled.T, strict=True)
    }


def find_smallest(
    column: Sequence[float] | Floats, values: ArrayLike, objectives: Sequence[Objective]
) -> int:
    """Return the index of the smallest value in a column `[T]` that need not be an objective.

    Ties go to the point that is better in the objectives, then to the first.
    """
    return int(np.lexsort((_scale_losses(values, objectives).sum(axis=1), np.asarray(column)))[0])


def subtract_estimates(one: Estimate, other: Estimate, comparisons: int = 1) -> Estimate:
    """Return the difference of two values, with an interval by square-and-add.

    With `comparisons`, all of so many intervals hold together at 95 %.

    Source: Newcombe 1998, Interval estimation for the difference between independent proportions;
    Zou and Donner 2008 (intervals of any kind).
    """
    gap, df = one.mean - other.mean, max(one.df, other.df)
    wider = compute_quantile(df, comparisons) / compute_quantile(df)
    low = gap - wider * math.hypot(one.mean - one.low, other.high - other.mean)
    high = gap + wider * math.hypot(one.high - one.mean, other.mean - other.low)
    return Estimate(gap, math.hypot(one.se, other.se), low, high, df=df)


def is_above(one: Estimate, other: Estimate, comparisons: int = 1) -> bool:
    """Return whether a value is higher than another by more than the noise of `comparisons`."""
    return subtract_estimates(one, other, comparisons).low > 0


def _scale_losses(values: ArrayLike, objectives: Sequence[Objective]) -> Floats:
    points = compute_losses(values, objectives)
    if len(points) == 0:
        return points
    best = points.min(axis=0)
    span = points.max(axis=0) - best
    return (points - best) / np.where(span > 0, span, 1.0)


class Origin(NamedTuple):
    """One kind of candidates: its part of the front, and the cost of its trials together."""

    kind: Kind
    trials: int
    """Trials of this kind, replicates included, in any state."""
    members: int
    """Configurations of this kind on the front."""
    hypervolume: float
    """Hypervolume of the candidates of this kind and of the kinds before it."""
    share: float
    """Part of the front's hypervolume that this kind adds to those before it; 0 without any."""
    cost: Cost
    continued: int
    """Completions of trainings after the rung at which each had waited first."""


def summarize_origins(front: Front) -> tuple[Origin, ...]:
    """Summarize the kinds of candidates that a sweep has, in the order of `KINDS`.

    The shares are nested and sum to 1: ends alone, then what checkpoints add, then what merges add
    to both. Empty for a sweep without checkpoints and merges, where ends are all there is.
    """
    kinds = {r.number: KINDS[min(len(r.parts), 2)] for r in front.records if not r.is_initial}
    if set(kinds.values()) <= {"ends"}:
        return ()
    origins: list[Origin] = []
    points: list[tuple[float, ...]] = []
    before = 0.0
    for kind in KINDS:
        numbers = {number for number, own in kinds.items() if own == kind}
        ranked = [c for c in front.configurations if c.rank >= 0 and c.first in numbers]
        points += [c.get_values(front.objectives) for c in ranked]
        volume = compute_hypervolume(points, front.objectives)
        share = (volume - before) / front.hypervolume if front.hypervolume else 0.0
        own = [r for r in front.records if r.number in numbers]
        cost, waited = sum_costs([r.cost for r in own]), [r for r in own if r.paused_at]
        continued = sum(r.cost.completions - r.rungs[0].completions for r in waited)
        members = sum(c.is_on_front for c in ranked)
        origins.append(Origin(kind, len(numbers), members, volume, share, cost, continued))
        before = volume
    return tuple(origin for origin in origins if origin.trials)


def find_parents(front: Front, candidate: Configuration) -> list[Configuration]:
    """Find the measured candidates that a merge or a checkpoint consists of, in its order.

    A part is missing if it was never evaluated on test prompts.
    """
    owners: dict[tuple[int, int | None], Configuration] = {}
    last_steps = {record.number: record.last_step for record in front.records}
    for configuration in front.configurations:
        if len(configuration.parts) == 1:
            part = configuration.parts[0]
            owners[part.trial, part.step] = configuration
        elif configuration.is_training:
            owners |= {(n, last_steps[n]): configuration for n in configuration.numbers}
    found = [owners.get((part.trial, part.step)) for part in candidate.parts]
    return [parent for parent in found if parent is not None and parent is not candidate]


def has_stagnated(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], patience: int
) -> bool:
    """Return whether the last `patience` search trials that ended did not move the hypervolume.

    H is over the validation means of all search trials (and the published setting) that ended; H'
    is over those that had ended before the last `patience` ones. The hypervolume moved if H - H' is
    above 1 % of H' and above 1.96 standard errors of H - H', by equal draws of all means for both.
    Replicates do not count, so that they never revive a search. Neither a hypervolume of 0 nor a
    patience of 0 ever stagnates.
    """
    if not patience:
        return False
    ended = [r for r in records if not r.is_open]
    tried = [r for r in ended if r.role in ("search", "published")]
    search = [r for r in tried if r.role == "search"]
    if len(search) < patience:
        return False
    search.sort(key=lambda record: (record.finished or math.inf, record.number))
    latest = {record.number for record in search[-patience:]}
    feasible = [c for c in pool_trials(tried, objectives) if c.feasible]
    estimates = [[c.validation[goal.name] for goal in objectives] for c in feasible]
    means = np.array([[estimate.mean for estimate in row] for row in estimates])
    before = np.array([not latest.issuperset(c.numbers) for c in feasible], dtype=np.bool_)
    now = compute_hypervolume(means, objectives)
    earlier = compute_hypervolume(means[before], objectives)
    if now <= 0:
        return False
    errors = np.array([[estimate.se for estimate in row] for row in estimates])
    moves = [
        compute_loss_hypervolume(drawn, objectives)
        - compute_loss_hypervolume(drawn[before], objectives)
        for drawn in draw_points(compute_losses(means, objectives), errors, MOVE_DRAWS)
    ]
    return now - earlier <= max(MIN_MOVE * earlier, Z_95 * float(np.std(moves)))
