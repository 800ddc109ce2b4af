"""Agreement of scores at a rung with final scores: the cost of stopping trials early there.

Only trials that ran to their end have both scores. Under early stopping those are the better ones,
and a rung ranks them worse than it ranks all trials. So the figures are a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdpo_tune.analysis.pareto import Floats, rank_points
from gdpo_tune.analysis.resampling import rank_values
from gdpo_tune.core.trials import Objective, Rung, TrialRecord

FEWEST = 5
"""Fewest trials for a rank correlation."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of one rung with final scores."""

    completions: int
    """Completions at the rung."""
    trials: int
    """Complete trials that were measured there."""
    correlation: Mapping[str, float]
    """Objective -> Spearman's rank correlation of rung and final scores, from -1 to 1; NaN where
    all are equal."""
    dominated: int
    """Members of these trials' final front that others dominated at the rung: the loss of a
    scheduler that keeps only the front there."""
    front: int
    """Members of that front."""

    def __str__(self) -> str:
        """Return one line for a person."""
        correlations = ", ".join(
            f"{name} {'-' if math.isnan(value) else f'{value:.2f}'}"
            for name, value in self.correlation.items()
        )
        return (
            f"at {self.completions:,} completions, rank correlation with final scores: "
            f"{correlations} ({self.trials} complete trials; of the {self.front} on their final "
            f"front, {self.dominated} were dominated then)"
        )


def measure_agreements(
    records: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> tuple[Agreement, ...]:
    """Measure the agreement at each rung that at least five complete search trials share.

    All scores are on validation prompts. A trial's last measurement is not a rung.
    Source: Spearman 1904, The proof and measurement of association between two things.
    """
    levels: dict[int, list[tuple[Rung, TrialRecord]]] = {}
    for record in records:
        if record.role == "search" and record.state == "complete" and record.is_comparable:
            for rung in record.rungs:
                if rung.completions < record.cost.completions:
                    levels.setdefault(rung.completions, []).append((rung, record))
    return tuple(
        _measure_agreement(completions, levels[completions], objectives)
        for completions in sorted(levels)
        if len(levels[completions]) >= FEWEST
    )


def _measure_agreement(
    completions: int, measured: Sequence[tuple[Rung, TrialRecord]], objectives: Sequence[Objective]
) -> Agreement:
    names = [objective.name for objective in objectives]
    early = np.array([[rung.validation[name].mean for name in names] for rung, _ in measured])
    late = np.array([[record.validation[name].mean for name in names] for _, record in measured])
    best = rank_points(late, objectives) == 0
    return Agreement(
        completions,
        len(measured),
        {name: correlate_ranks(early[:, i], late[:, i]) for i, name in enumerate(names)},
        int((best & (rank_points(early, objectives) > 0)).sum()),
        int(best.sum()),
    )


def correlate_ranks(one: Floats, other: Floats) -> float:
    """Return Spearman's rank correlation of two samples `[T]`; NaN where one is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan
    return float(np.corrcoef(rank_values(one), rank_values(other))[0, 1])
