"""One side of a comparison: the configurations that a search tried, baselines left out.

Shapes: T configurations tried, M objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdpo_tune.analysis.pareto import Floats, loss_front, loss_hypervolume, losses
from gdpo_tune.analysis.replicates import (
    Configuration,
    configurations,
    first_of,
    grouped,
    is_measured,
)
from gdpo_tune.core.trials import Objective, TrialRecord

CHOICES = 200
"""Random choices of as many configurations as the smaller side has."""


@dataclass(frozen=True)
class Side:
    """What one search tried."""

    name: str
    objectives: tuple[Objective, ...]
    configurations: tuple[Configuration, ...]
    """Measured at full budget, feasible or not."""
    independent: tuple[Configuration, ...]
    """Those whose values may be compared one by one: see `side_of`."""
    stopped: int
    """Configurations that ended at a rung."""
    failed: int
    """Trials that ended without a result, of whatever configuration."""
    seconds: float
    """Wall time of all trials together."""
    completions: int
    """Sampled by all trials together."""

    @property
    def tried(self) -> int:
        """Configurations that had their chance."""
        return len(self.configurations) + self.stopped

    @cached_property
    def points(self) -> Floats:
        """Losses `[tried, M]`; a row of NaN for what was stopped or breaks a constraint."""
        rows = losses([c.values(self.objectives) for c in self.configurations], self.objectives)
        feasible = np.array([c.feasible for c in self.configurations], dtype=np.bool_)
        rows = np.where(feasible[:, None], rows, np.nan)
        return np.vstack([rows, np.full((self.stopped, len(self.objectives)), np.nan)])

    @property
    def front(self) -> Floats:
        """The non-dominated ones among `points`."""
        return front_of(self.points)

    @property
    def replicated(self) -> bool:
        """Whether some configuration has two seeds."""
        return any(c.seeds > 1 for c in self.configurations)


def side_of(
    name: str,
    records: Sequence[TrialRecord],
    objectives: Sequence[Objective],
    *,
    shared: bool = False,
) -> Side:
    """What a search tried: its trials without the baselines, which no search proposed.

    Args:
        name: of the side.
        records: its trials.
        objectives: of the sweep.
        shared: the other side's trials come from the same sweep. Then a model moved one side's
            proposals because of the other's values, and only those that no model made are
            independent of them.
    """
    kept = [r for r in records if r.role not in ("untrained", "published")]
    goals = tuple(objectives)
    stopped = sum(
        first_of(seeds).state == "pruned" and not any(is_measured(seed, goals) for seed in seeds)
        for seeds in grouped(kept).values()
    )
    known = tuple(configurations(kept, goals))
    modelled = {record.number for record in kept if record.proposer == "model"}
    return Side(
        name=name,
        objectives=goals,
        configurations=known,
        independent=tuple(c for c in known if not (shared and c.first in modelled)),
        stopped=stopped,
        failed=sum(record.state == "failed" for record in kept),
        seconds=sum(record.cost.seconds for record in kept),
        completions=sum(record.cost.completions for record in kept),
    )


def front_of(points: Floats) -> Floats:
    """The non-dominated rows of losses `[T, M]`, those with NaN left out."""
    return points[loss_front(points)]


def volume_at(side: Side, count: int) -> float:
    """Mean hypervolume of `count` configurations of a side."""
    if count == side.tried:
        return loss_hypervolume(side.points, side.objectives)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(side.tried)[:count] for _ in range(CHOICES)]
    return float(np.mean([loss_hypervolume(side.points[c], side.objectives) for c in chosen]))
