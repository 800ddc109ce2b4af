"""The front of a sweep with all that display, figures and tracking say about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdpo_tune.analysis.pareto import (
    Floats,
    hypervolume,
    loss_front,
    loss_hypervolume,
    losses,
)
from gdpo_tune.analysis.probability import Interval, hypervolume_interval
from gdpo_tune.analysis.replicates import (
    Configuration,
    configurations,
    grouped,
    is_feasible,
    is_measured,
    pooled,
)
from gdpo_tune.analysis.selection import extremes, is_ahead, knee
from gdpo_tune.core.trials import Objective, TrialRecord

MOST_TIES = 3
"""Trials that are named beside the one they are tied with."""


@dataclass(frozen=True)
class HypervolumePoint:
    """The hypervolume once a trial had ended."""

    number: int
    """The trial that ended."""
    hypervolume: float


@dataclass(frozen=True)
class Front:
    """The non-dominated configurations of a sweep, on test prompts, and what surrounds them."""

    objectives: tuple[Objective, ...]
    records: tuple[TrialRecord, ...]
    configurations: tuple[Configuration, ...]
    """Every measured configuration, dominated and infeasible ones and baselines included."""
    members: tuple[Configuration, ...]
    """Those on the front, best in the first objective first."""
    baselines: tuple[Configuration, ...]
    """The untrained policy and the published weights, as far as measured."""
    knee: Configuration | None
    """The best compromise; None while the front is empty."""
    extremes: dict[str, Configuration]
    """Objective -> the member that is best in it; empty while the front is empty."""
    hypervolume: float
    """Of the front, against the objectives' fixed references."""
    chosen: Configuration | None = None
    """What a person chose, on the front or not."""

    @cached_property
    def trial_numbers(self) -> frozenset[int]:
        """Numbers of all trials of the members."""
        return frozenset(number for member in self.members for number in member.numbers)

    @cached_property
    def hypervolume_over_trials(self) -> tuple[HypervolumePoint, ...]:
        """The hypervolume after each trained trial that ended, in order of ending.

        Each point is the front as it was known then, over the means of the seeds so far: the curve
        falls where a replicate shows that a first trial was lucky, and it ends at `hypervolume`.
        """
        return _hypervolume_trace(self.records, self.objectives)

    @cached_property
    def hypervolume_interval(self) -> Interval:
        """Where the true hypervolume lies, as far as the standard errors tell.

        Rivals just below the front count too: noise may have put them there.
        """
        rivals = self._eligible
        return hypervolume_interval(
            [c.values(self.objectives) for c in rivals],
            [c.errors(self.objectives) for c in rivals],
            self.objectives,
        )

    def picked_as(self, configuration: Configuration, *, ties: bool = False) -> list[str]:
        """Return why a configuration is singled out: `chosen`, `knee`, `highest correctness`, ...

        Args:
            configuration: one of `configurations`.
            ties: True adds to an extreme the trials that it is tied with, such as `highest
                correctness (tied with 5, 15)`.
        """
        names = ["chosen"] if configuration is self.chosen else []
        names += ["knee"] if configuration is self.knee else []
        return names + [
            name_extreme(goal) + (self._name_ties(goal.name) if ties else "")
            for goal in self.objectives
            if self.extremes.get(goal.name) is configuration
        ]

    def list_ties(self, objective: str) -> list[Configuration]:
        """Return the configurations that differ from the extreme by no more than noise.

        Dominated ones count too. The closest comes first.
        """
        best = self.extremes[objective]
        rivals = [c for c in self._eligible if c is not best]
        tied = [c for c in rivals if not is_ahead(best.mean[objective], [c.mean[objective]])]
        return sorted(tied, key=lambda c: abs(c.mean[objective].mean - best.mean[objective].mean))

    def _name_ties(self, objective: str) -> str:
        numbers = [str(c.first) for c in self.list_ties(objective)]
        more = len(numbers) - MOST_TIES
        others = f" and {more} more" if more > 0 else ""
        return f" (tied with {', '.join(numbers[:MOST_TIES])}{others})" if numbers else ""

    @property
    def seeds_compared(self) -> bool:
        """Whether some configuration has two seeds, so that the noise of training is known."""
        return any(c.seeds > 1 and c.role != "untrained" for c in self.configurations)

    @property
    def _eligible(self) -> list[Configuration]:
        return [c for c in self.configurations if c.rank >= 0]


def name_extreme(objective: Objective) -> str:
    """Return `highest correctness`, or `lowest mean length` for a minimised objective."""
    word = "highest" if objective.direction == "maximize" else "lowest"
    return f"{word} {objective.name.replace('_', ' ')}"


def build_front(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], chosen: int | None = None
) -> Front:
    """The front of all complete trials in `records`; works for none at all.

    Args:
        records: every trial.
        objectives: of the sweep.
        chosen: number of the trial that a person chose.
    """
    goals = tuple(objectives)
    known = tuple(configurations(records, goals))
    ahead = -1.0 if goals[0].direction == "maximize" else 1.0
    members = tuple(
        sorted((c for c in known if c.on_front), key=lambda c: ahead * c.values(goals)[0])
    )
    values = [member.values(goals) for member in members]
    compromise = knee(values, goals)
    return Front(
        objectives=goals,
        records=tuple(records),
        configurations=known,
        members=members,
        baselines=tuple(c for c in known if c.role in ("untrained", "published")),
        knee=None if compromise is None else members[compromise],
        extremes={name: members[index] for name, index in extremes(values, goals).items()},
        hypervolume=hypervolume(values, goals),
        chosen=next((c for c in known if chosen in c.numbers), None),
    )


def _hypervolume_trace(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> tuple[HypervolumePoint, ...]:
    key_of = {r.number: key for key, members in grouped(records).items() for r in members}
    ended = [r for r in records if r.role != "untrained" and r.finished is not None]
    ended.sort(key=lambda record: (record.finished or math.inf, record.number))
    seeds: dict[object, list[TrialRecord]] = {}
    points: dict[object, tuple[float, ...]] = {}
    front: Floats = losses([], objectives)
    value = 0.0
    trace: list[HypervolumePoint] = []
    for record in ended:
        key = key_of[record.number]
        if is_measured(record, objectives):
            seeds.setdefault(key, []).append(record)
            before, now = points.pop(key, None), None
            if is_feasible(seeds[key]):
                now = points[key] = tuple(
                    pooled([seed.test[goal.name] for seed in seeds[key]]).mean
                    for goal in objectives
                )
            if before is not None:  # it was on the front, perhaps, and has moved
                front = _front_of(losses(list(points.values()), objectives))
                value = loss_hypervolume(front, objectives)
            elif now is not None:
                point = losses([now], objectives)
                # Most come behind the front as it is: of thousands, few are looked at twice.
                if not (front <= point).all(axis=1).any():
                    front = _front_of(np.concatenate([front, point]))
                    value = loss_hypervolume(front, objectives)
        trace.append(HypervolumePoint(record.number, value))
    return tuple(trace)


def _front_of(points: Floats) -> Floats:
    """Those losses that no other one dominates."""
    return points[loss_front(points)]
