"""One side of a comparison: the configurations that a search trained, without the baselines.

A configuration that was tried is a training with all candidates that are made of it: its end, its
checkpoints, and the merges in which it has the largest weight (the latest of equal ones). The
candidates of one training resemble one another, so they are drawn, permuted and counted together.

Shapes: P points, M objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdpo_tune.analysis.pareto import Floats, compute_loss_hypervolume, compute_losses, select_front
from gdpo_tune.analysis.probability import estimate_luck
from gdpo_tune.analysis.replicates import Configuration, find_original, group_trials, pool_trials
from gdpo_tune.analysis.resampling import Indices
from gdpo_tune.core.trials import Objective, TrialRecord

CHOICES = 200
"""Random choices of as many configurations as the smaller side has."""


@dataclass(frozen=True)
class Side:
    """Configurations and costs of one search."""

    name: str
    objectives: tuple[Objective, ...]
    configurations: tuple[Configuration, ...]
    """Candidates that were measured, feasible or not: ends, checkpoints and merges."""
    owners: tuple[int, ...]
    """Index of the training of each configuration, from 0."""
    trained: int
    """Trainings with a configuration."""
    independent: tuple[Configuration, ...]
    """Configurations whose values may be compared one by one: see `build_side`."""
    stopped: int
    """Trainings that ended at a rung, without a configuration."""
    failed: int
    """Trials that ended without a result, of any configuration."""
    seconds: float
    """Wall time of all trials together."""
    completions: int
    """Completions sampled by all trials together."""
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

    def get_points(self, trainings: Indices) -> Floats:
        """Return the rows of `points` of some trainings, each as often as it is named."""
        rows = [self._rows[index] for index in trainings]
        return self.points[np.concatenate(rows)] if rows else self.points[:0]

    @cached_property
    def luck(self) -> float:
        """Share of the hypervolume that is luck: see `estimate_luck`; 0 without a hypervolume."""
        kept = [c for c in self.configurations if c.can_be_on_front]
        values = [c.get_values(self.objectives) for c in kept]
        errors = [c.get_errors(self.objectives) for c in kept]
        hypervolume = compute_loss_hypervolume(self.points, self.objectives)
        luck = estimate_luck(values, errors, self.objectives)
        return min(1.0, luck / hypervolume) if hypervolume > 0 else 0.0

    @property
    def front(self) -> Floats:
        """The non-dominated rows of `points`."""
        return select_front(self.points)

    @property
    def has_replicates(self) -> bool:
        """True if some configuration has two seeds."""
        return any(c.seeds > 1 for c in self.configurations)


def build_side(
    name: str,
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    *,
    shared: bool = False,
) -> Side:
    """Build a side from the trials of a search, without the baselines, which no search proposed.

    `shared` is True if the other side's trials come from the same sweep. Then only configurations
    that no model proposed are independent: a model tries more of a mode in a corner of the space
    where that mode looked good, which says nothing about the mode.
    """
    kept = [r for r in records if r.role not in ("untrained", "published")]
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
    owners = [trainings[_find_owner(c)] for c in measured]
    order = {number: index for index, number in enumerate(dict.fromkeys(owners))}
    stopped = {
        trainings[r.number]
        for r in kept
        if r.state == "pruned" and r.role != "replicate"
        if r.number in trainings
    }
    modelled = {record.number for record in kept if record.proposer == "model"}
    return Side(
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


def _find_owner(configuration: Configuration) -> int:
    """Return the number of the trial that a configuration belongs to: the heaviest part."""
    heaviest = max(configuration.parts, key=lambda part: (part.weight, part.trial), default=None)
    return configuration.first if heaviest is None else heaviest.trial


def estimate_hypervolume_at(side: Side, count: int) -> float:
    """Estimate the mean hypervolume of `count` configurations of a side."""
    if count == side.tried_count:
        return compute_loss_hypervolume(side.points, side.objectives)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(side.tried_count)[:count] for _ in range(CHOICES)]
    return float(
        np.mean([compute_loss_hypervolume(side.get_points(c), side.objectives) for c in chosen])
    )
