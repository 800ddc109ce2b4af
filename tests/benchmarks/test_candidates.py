"""The simulation of candidates: validation chooses what is tested, and records keep families."""

from __future__ import annotations

import numpy as np
from candidates import Case, build_records, simulate_sweep
from verdicts import GOALS

from gdpo_tune.analysis.comparison import build_arm
from gdpo_tune.analysis.pareto import rank_points

CASE = Case(4, 3, 5, 6)


def test_validation_alone_chooses_what_is_tested():
    sweep = simulate_sweep(CASE, 0)
    assert len(sweep.truth) == len(sweep.parents) == CASE.count == 12
    assert len(sweep.chosen) == 6
    ranks = rank_points(sweep.validation, GOALS)
    assert ranks[sweep.chosen].max() <= np.delete(ranks, sweep.chosen).min()
    assert (np.abs(sweep.test - sweep.truth) > 0).all()


def test_candidates_of_luck_are_as_good_as_an_end():
    truth = simulate_sweep(Case(4, 3, 5, 6, luck=True), 0).truth
    assert all((row == truth[:4]).all(axis=1).any() for row in truth[4:])


def test_a_side_has_as_many_configurations_as_trainings():
    side = build_arm("A", build_records(CASE, 0), GOALS)
    assert side.tried_count == 4
    assert len(side.configurations) > 4
