"""Problems of pymoo as search problems, without fidelity: one measurement at the end of a trial."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from problems import Curve, build_exact_estimates

from gdpo_tune.core.trials import Params
from gdpo_tune.spec import Choices, Constraint, ObjectiveSpec, Uniform

REFERENCES: Mapping[str, tuple[float, ...]] = {
    "zdt1": (1.1, 6.0),
    "zdt2": (1.1, 6.0),
    "zdt3": (1.1, 6.0),
    "dtlz2": (1.5, 1.5, 1.5),
    "bnh": (140.0, 50.0),
    "osy": (0.0, 80.0),
}
"""Problem -> worst values of interest: worse than the whole front, so that random feasible points
count."""
BEST: Mapping[str, tuple[float, ...]] = {
    "zdt1": (0.0, 0.0),
    "zdt2": (0.0, 0.0),
    "zdt3": (0.0, -0.774),
    "dtlz2": (0.0, 0.0, 0.0),
    "bnh": (0.0, 4.0),
    "osy": (-274.0, 4.0),
}
"""Problem -> the ideal point of its front."""
DIMENSIONS: Mapping[str, dict[str, int]] = {
    "zdt1": {"n_var": 6},
    "zdt2": {"n_var": 6},
    "zdt3": {"n_var": 6},
    "dtlz2": {"n_var": 6, "n_obj": 3},
    "bnh": {},
    "osy": {},
}
"""As many parameters as a training's search space; the last two problems have fixed 2 and 6."""


class PymooProblem:
    """Test problem by name; every objective is minimised, every constraint is `<= 0`.

    Raises:
        ImportError: pymoo is not installed.
    """

    levels = (1,)
    rungs: tuple[int, ...] = ()
    has_checkpoints = False
    evaluation_cost = 0

    def __init__(self, name: str) -> None:
        from pymoo.problems import get_problem

        self.name = name
        self._problem = get_problem(name, **DIMENSIONS[name])
        bounds = zip(self._problem.xl, self._problem.xu, strict=True)
        self.domains: Mapping[str, Choices | Uniform] = {
            f"x{index + 1}": Uniform(low=float(low), high=float(high))
            for index, (low, high) in enumerate(bounds)
        }
        self.objectives: Mapping[str, ObjectiveSpec] = {
            f"f{index + 1}": ObjectiveSpec(direction="minimize", reference=worst)
            for index, worst in enumerate(REFERENCES[name])
        }
        self.best: Mapping[str, float] = dict(zip(self.objectives, BEST[name], strict=True))
        self.constraints: Mapping[str, Constraint] = {
            f"g{index + 1}": Constraint(op="<=", bound=0.0)
            for index in range(self._problem.n_ieq_constr)
        }

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """Return the values at the only level."""
        del rng
        return lambda level: build_exact_estimates(self.compute_truth(params, level))

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Compute objectives and constraints; there is one level."""
        del level
        point = np.array([params[name] for name in self.domains], dtype=np.float64)
        results = self._problem.evaluate(point, return_as_dictionary=True)
        values = [*results["F"], *results["G"]] if self.constraints else list(results["F"])
        return dict(zip([*self.objectives, *self.constraints], map(float, values), strict=True))

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Return one second for each trial."""
        del params
        return float(end - start)
