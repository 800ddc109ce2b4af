"""How much rungs tell of the end: what stopping trials early there costs.

Only trials that ran to their end can tell, and under early stopping those are the better ones:
among them a rung orders worse than among all. The figures are a floor rather than an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdpo_tune.analysis.pareto import Floats, ranks
from gdpo_tune.core.trials import Objective, Rung, TrialRecord

FEWEST = 5
"""Trials below which a rank correlation says nothing."""


@dataclass(frozen=True)
class Agreement:
    """What a rung told of the end."""

    completions: int
    """Where the rung is."""
    trials: int
    """Complete trials that were measured there."""
    correlation: Mapping[str, float]
    """Objective -> Spearman's rank correlation of rung and end, from -1 to 1; NaN where all are
    alike."""
    dominated: int
    """Members of the front of these trials at the end that others dominated at the rung: what a
    scheduler that keeps nothing but the front would have cost."""
    front: int
    """Members of that front."""

    def __str__(self) -> str:
        """In a line."""
        found = ", ".join(
            f"{name} {'-' if math.isnan(value) else f'{value:.2f}'}"
            for name, value in self.correlation.items()
        )
        return (
            f"at {self.completions:,} completions, rank correlation with final scores: {found} "
            f"({self.trials} complete trials; dominated there: {self.dominated} of the "
            f"{self.front} on their final front)"
        )


def agreements(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> tuple[Agreement, ...]:
    """For every rung before the end that at least five complete trials of the search share.

    Everything is on validation prompts. Source: Spearman 1904, The proof and measurement of
    association between two things.
    """
    complete = [r for r in records if r.role == "search" and r.state == "complete"]
    levels: dict[int, list[tuple[Rung, TrialRecord]]] = {}
    for record in complete:
        for rung in record.rungs:
            if rung.completions < record.cost.completions:
                levels.setdefault(rung.completions, []).append((rung, record))
    return tuple(
        _agreement(completions, levels[completions], objectives)
        for completions in sorted(levels)
        if len(levels[completions]) >= FEWEST
    )


def _agreement(
    completions: int,
    measured: Sequence[tuple[Rung, TrialRecord]],
    objectives: Sequence[Objective],
) -> Agreement:
    names = [objective.name for objective in objectives]
    early = np.array([[rung.validation[name].mean for name in names] for rung, _ in measured])
    late = np.array([[record.validation[name].mean for name in names] for _, record in measured])
    best = ranks(late, objectives) == 0
    return Agreement(
        completions,
        len(measured),
        {name: spearman(early[:, i], late[:, i]) for i, name in enumerate(names)},
        int((best & (ranks(early, objectives) > 0)).sum()),
        int(best.sum()),
    )


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation of two samples `[T]`; NaN where one of them is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan
    from scipy.stats import rankdata  # takes most of a second to import, which only the end needs

    return float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])
