"""Convergence of a search: stagnation, and the agreement of rungs with final scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gdpo_tune.analysis.pareto import (
    Floats,
    compute_hypervolume,
    compute_loss_hypervolume,
    compute_losses,
    rank_points,
)
from gdpo_tune.analysis.replicates import pool_trials
from gdpo_tune.analysis.uncertainty import draw_points, rank_values
from gdpo_tune.core.trials import CLEAR, Objective, Rung, TrialRecord

MIN_MOVE = 0.01
"""Share of the hypervolume that a move has to exceed."""
DRAWS = 200
MIN_TRIALS = 5
"""Fewest trials for a rank correlation."""


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
    ended = [r for r in records if not r.is_open and r.is_comparable]
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
        for drawn in draw_points(compute_losses(means, objectives), errors, DRAWS)
    ]
    return now - earlier <= max(MIN_MOVE * earlier, CLEAR * float(np.std(moves)))


class Agreement(NamedTuple):
    """Agreement of one rung with final scores."""

    completions: int
    """Completions at the rung."""
    trials: int
    """Complete trials that were measured there."""
    correlation: Mapping[str, float]
    """Objective -> Spearman's rank correlation of rung and final scores, from -1 to 1; NaN where
    all are equal."""
    dominated: int
    """Members of these trials' final front that others dominated at the rung."""
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

    All scores are on validation prompts. Only trials that ran to their end have both scores. Under
    early stopping those are the better ones, and a rung ranks them worse than it ranks all trials:
    the figures are a lower bound.

    Source: Spearman 1904, The proof and measurement of association between two things.
    """
    levels: dict[int, list[tuple[Rung, TrialRecord]]] = {}
    for record in records:
        if record.role == "search" and record.state == "complete" and record.is_comparable:
            for rung in record.rungs:
                if rung.completions < record.cost.completions:
                    levels.setdefault(rung.completions, []).append((rung, record))
    names = [objective.name for objective in objectives]
    agreements: list[Agreement] = []
    for completions, measured in sorted(levels.items()):
        if len(measured) < MIN_TRIALS:
            continue
        early = np.array([[rung.validation[n].mean for n in names] for rung, _ in measured])
        late = np.array([[record.validation[n].mean for n in names] for _, record in measured])
        best = rank_points(late, objectives) == 0
        correlation = {n: correlate_ranks(early[:, i], late[:, i]) for i, n in enumerate(names)}
        dominated = int((best & (rank_points(early, objectives) > 0)).sum())
        size = len(measured)
        agreements.append(Agreement(completions, size, correlation, dominated, int(best.sum())))
    return tuple(agreements)


def correlate_ranks(one: Floats, other: Floats) -> float:
    """Return Spearman's rank correlation of two samples `[T]`; NaN where one is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan
    return float(np.corrcoef(rank_values(one), rank_values(other))[0, 1])
