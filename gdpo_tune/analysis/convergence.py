"""Convergence of a search: the trials in a row that did not move the hypervolume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gdpo_tune.analysis.pareto import (
    compute_hypervolume,
    compute_loss_hypervolume,
    compute_losses,
)
from gdpo_tune.analysis.replicates import pool_trials
from gdpo_tune.analysis.uncertainty import draw_points
from gdpo_tune.core.trials import CLEAR, Objective, TrialRecord

MIN_MOVE = 0.01
"""Share of the hypervolume that a move has to exceed."""
DRAWS = 200


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
