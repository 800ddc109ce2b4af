"""The simulation of single intervals: outcomes are as correlated as asked, rates are counted."""

from __future__ import annotations

import numpy as np
import pytest
from verdicts import draw_outcomes, measure_marks, measure_replicates, measure_shares


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_completions_of_a_prompt_are_as_alike_as_asked(alike):
    """Source: the intraclass correlation of a beta-binomial distribution."""
    drawn = draw_outcomes(0.8, (1, 20_000, 2), alike, np.random.default_rng(0)).reshape(-1, 2)
    assert drawn.mean() == pytest.approx(0.8, abs=0.01)
    assert np.corrcoef(drawn.T)[0, 1] == pytest.approx(alike, abs=0.03)


def test_intervals_cover():
    assert min(measure_shares(64, 4, 0.3, 100).values()) >= 0.9
    assert min(measure_replicates((2, 2), 300)) >= 0.9


def test_equal_policies_are_not_marked():
    assert measure_marks(3, 1, trials=20) == {"sweeps": 3, "marked": 0.0, "not_tied": 0.0}
