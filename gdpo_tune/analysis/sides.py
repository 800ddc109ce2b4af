"""One side of a comparison: the configurations that a search trained, without the baselines.

Checkpoints and merges do not count: each is made of trainings that count, so it is no independent
observation of its side.

Shapes: T configurations tried, M objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdpo_tune.analysis.pareto import Floats, compute_loss_hypervolume, compute_losses, select_front
from gdpo_tune.analysis.replicates import (
    Configuration,
    find_original,
    group_trials,
    is_measured,
    pool_trials,
)
from gdpo_tune.core.trials import Objective, TrialRecord

CHOICES = 200
"""Random choices of as many configurations as the smaller side has."""


@dataclass(frozen=True)
class Side:
    """Configurations and costs of one search."""

    name: str
    objectives: tuple[Objective, ...]
    configurations: tuple[Configuration, ...]
    """Measured at full budget, feasible or not."""
    independent: tuple[Configuration, ...]
    """Configurations whose values may be compared one by one: see `build_side`."""
    stopped: int
    """Configurations that ended at a rung."""
    failed: int
    """Trials that ended without a result, of any configuration."""
    seconds: float
    """Wall time of all trials together."""
    completions: int
    """Completions sampled by all trials together."""
    evaluations: int = 0
    """Trials that evaluated a checkpoint or a merge; they do not count."""

    @property
    def tried_count(self) -> int:
        """Number of configurations, measured or stopped."""
        return len(self.configurations) + self.stopped

    @cached_property
    def points(self) -> Floats:
        """Losses `[tried, M]`; a row of NaN for what was stopped or breaks a constraint."""
        rows = compute_losses(
            [c.get_values(self.objectives) for c in self.configurations], self.objectives
        )
        feasible = np.array([c.feasible for c in self.configurations], dtype=np.bool_)
        rows = np.where(feasible[:, None], rows, np.nan)
        return np.vstack([rows, np.full((self.stopped, len(self.objectives)), np.nan)])

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
    kept = [r for r in records if r.is_training and r.role != "published"]
    goals = tuple(objectives)
    stopped = sum(
        find_original(seeds).state == "pruned"
        and not any(is_measured(seed, goals) for seed in seeds)
        for seeds in group_trials(kept).values()
    )
    measured = tuple(pool_trials(kept, goals))
    modelled = {record.number for record in kept if record.proposer == "model"}
    return Side(
        name=name,
        objectives=goals,
        configurations=measured,
        independent=tuple(c for c in measured if not (shared and c.first in modelled)),
        stopped=stopped,
        failed=sum(record.state == "failed" for record in kept),
        seconds=sum(record.cost.seconds for record in kept),
        completions=sum(record.cost.completions for record in kept),
        evaluations=sum(bool(record.parts) for record in records),
    )


def estimate_hypervolume_at(side: Side, count: int) -> float:
    """Estimate the mean hypervolume of `count` configurations of a side."""
    if count == side.tried_count:
        return compute_loss_hypervolume(side.points, side.objectives)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(side.tried_count)[:count] for _ in range(CHOICES)]
    return float(
        np.mean([compute_loss_hypervolume(side.points[c], side.objectives) for c in chosen])
    )
