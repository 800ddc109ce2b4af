"""Branin and Currin with a fidelity: two objectives that trade off, to compare schedulers.

Source: Irshad, Karsch and Doepp 2021, Expected hypervolume improvement for simultaneous
multi-objective and multi-fidelity optimization (arXiv 2112.13901), as in BoTorch's
`MOMFBraninCurrin`, whose objectives are (21 - branin) / 22 and (14 - currin) / 15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from problems import Curve, build_exact_estimates

from gdpo_tune.core.trials import Params
from gdpo_tune.spec import Choices, Constraint, ObjectiveSpec, Uniform

LEVELS = (1, 3, 9, 27)
"""Levels in units of simulated training; the last one has a fidelity of 1."""
BRANIN_WORST, CURRIN_WORST = 150.0, 14.0
"""Worst values of interest. Currin never exceeds 14. Branin exceeds 150 at 6 % of random points,
and BoTorch's reference of 21 at 64 %, which would leave few points to compare."""


class BraninCurrin:
    """Problem with both functions minimised; training goes from low to full fidelity."""

    name = "branin_currin"
    domains: Mapping[str, Choices | Uniform] = {
        "x1": Uniform(low=0.0, high=1.0),
        "x2": Uniform(low=0.0, high=1.0),
    }
    objectives: Mapping[str, ObjectiveSpec] = {
        "branin": ObjectiveSpec(direction="minimize", reference=BRANIN_WORST),
        "currin": ObjectiveSpec(direction="minimize", reference=CURRIN_WORST),
    }
    best: Mapping[str, float] = {"branin": 0.0, "currin": 0.0}
    constraints: Mapping[str, Constraint] = {}

    has_checkpoints = False
    evaluation_cost = 0

    def __init__(self, levels: tuple[int, ...] = LEVELS) -> None:
        self.levels = levels
        self.rungs = levels[:-1]

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """Return the values at the fidelity of each level, without noise."""
        del rng
        return lambda level: build_exact_estimates(self.compute_truth(params, level))

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Compute the values at the fidelity of a level."""
        return self._values(params, level / self.levels[-1])

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Return one second for each unit of training."""
        del params
        return float(end - start)

    def _values(self, params: Params, fidelity: float) -> dict[str, float]:
        x1, x2 = float(params["x1"]), float(params["x2"])
        return {
            "branin": compute_branin(x1, x2, fidelity),
            "currin": compute_currin(x1, x2, fidelity),
        }


def compute_branin(x1: float, x2: float, fidelity: float) -> float:
    """Compute Branin's function at a point of the unit square; fidelity changes its parameters."""
    away = 1 - fidelity
    across, up = 15 * x1 - 5, 15 * x2
    bend = 5.1 / (4 * math.pi**2) - 0.01 * away
    slope = 5 / math.pi - 0.1 * away
    shrink = 1 / (8 * math.pi) + 0.05 * away
    valley = up - bend * across**2 + slope * across - 6
    return valley**2 + 10 * (1 - shrink) * math.cos(across) + 10


def compute_currin(x1: float, x2: float, fidelity: float) -> float:
    """Compute Currin's exponential function at a point of the unit square.

    Low fidelity damps it: the factor 1 - exp(-1 / (2 x2)) has a weight of at most 0.1 here, not 1.
    """
    damp = math.exp(-1 / (2 * x2)) if x2 > 0 else 0.0
    above = 2300 * x1**3 + 1900 * x1**2 + 2092 * x1 + 60
    below = 100 * x1**3 + 500 * x1**2 + 4 * x1 + 20
    return (1 - 0.1 * (1 - fidelity) * damp) * above / below
