"""The simulation of single intervals: outcomes are as correlated as asked."""

from __future__ import annotations

import numpy as np
import pytest
from verdicts import draw_outcomes


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_completions_of_a_prompt_are_as_alike_as_asked(alike):
    """Source: the intraclass correlation of a beta-binomial distribution."""
    drawn = draw_outcomes(0.8, (1, 20_000, 2), alike, np.random.default_rng(0)).reshape(-1, 2)
    assert drawn.mean() == pytest.approx(0.8, abs=0.01)
    assert np.corrcoef(drawn.T)[0, 1] == pytest.approx(alike, abs=0.03)
