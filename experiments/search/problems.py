"""Problems of the comparisons of samplers: configurations with a learning curve each.

A problem returns a `Curve` for each trial, so that the random parts of a training (its seed, the
prompts of its measurements) belong to one trial.

    branin_currin  two objectives that trade off, with a fidelity. Source: Irshad, Karsch and Doepp
                   2021 (arXiv 2112.13901), as in BoTorch's `MOMFBraninCurrin`
    pymoo          without fidelity: one measurement at the end of a trial
    replayed       a table of real learning curves, `curves_math.parquet`

A surrogate, a Gaussian process for each metric and level, interpolates between the configurations
of the table. A replayed trial adds two random parts to its mean: one deviation of the training for
each metric, equal at all rungs in units of the level's own spread, and at every rung an error of
measurement as large as the table's standard errors there. Values stay within the metric's range.
The true values are the means of the process through the test values. A trial takes as long as the
nearest configuration of the table.

Shapes: M objectives, C configurations, L levels, D features: one in [0, 1] for each number, on its
own scale, and one in {0, 1} for each choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Estimate, Params
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import Constraint, ObjectiveSpec, Search
from gdpo_tune.spec.space import Choices, Space, Uniform

Floats = NDArray[np.float64]
Estimates = Mapping[str, Estimate]
Curve = Callable[[int], Estimates]
"""Completions sampled so far -> estimates that the search sees then."""


class Problem:
    """Problem whose trials run in simulated time, without noise."""

    name: str
    domains: Mapping[str, Choices | Uniform]
    objectives: Mapping[str, ObjectiveSpec]
    constraints: Mapping[str, Constraint] = {}
    best: Mapping[str, float]
    """Objective -> bound of its best value; with the references, the box of the hypervolume."""
    levels: tuple[int, ...] = (1,)
    """Completions at which a trial is measured; the last is the full budget."""
    has_checkpoints = False
    """True if the policy at every level is a candidate; False if only the end of a trial is."""
    evaluation_cost = 0
    """Completions of a measurement, which the budget pays."""

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Compute every objective and constrained metric at a level, without noise."""
        raise NotImplementedError

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """Draw the random parts of a training, and return what the search sees of it."""
        del rng
        return lambda level: build_exact_estimates(self.compute_truth(params, level))

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Compute the seconds of a trial from one level to another."""
        del params
        return float(end - start)

    @property
    def full_cost(self) -> int:
        """Completions of a trial with its full budget and all of its measurements."""
        return self.levels[-1] + self.evaluation_cost * len(self.levels)

    def build_spec(self, search: Search) -> SweepSpec:
        """Build the sweep of this problem."""
        names = dict.fromkeys(("name", "task", "policy"), self.name)
        goals = {"objectives": dict(self.objectives), "constraints": dict(self.constraints)}
        return SweepSpec(**names, **goals, space=Space(domains=dict(self.domains)), search=search)


def build_exact_estimates(values: Mapping[str, float]) -> Estimates:
    return {name: Estimate(float(value), 0.0) for name, value in values.items()}


class BraninCurrin(Problem):
    """Problem with both functions minimised; training goes from low to full fidelity.

    Branin exceeds 150 at 6 % of random points, and BoTorch's reference of 21 at 64 %.
    """

    name = "branin_currin"
    levels = (1, 3, 9, 27)
    domains = {"x1": Uniform(low=0.0, high=1.0), "x2": Uniform(low=0.0, high=1.0)}
    objectives = {
        "branin": ObjectiveSpec(direction="minimize", reference=150.0),
        "currin": ObjectiveSpec(direction="minimize", reference=14.0),
    }
    best = {"branin": 0.0, "currin": 0.0}

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        point, fidelity = (float(params["x1"]), float(params["x2"])), level / self.levels[-1]
        return {
            "branin": compute_branin(*point, fidelity),
            "currin": compute_currin(*point, fidelity),
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


PYMOO: Mapping[str, tuple[dict[str, int], tuple[float, ...], tuple[float, ...]]] = {
    "zdt1": ({"n_var": 6}, (1.1, 6.0), (0.0, 0.0)),
    "zdt2": ({"n_var": 6}, (1.1, 6.0), (0.0, 0.0)),
    "zdt3": ({"n_var": 6}, (1.1, 6.0), (0.0, -0.774)),
    "dtlz2": ({"n_var": 6, "n_obj": 3}, (1.5, 1.5, 1.5), (0.0, 0.0, 0.0)),
    "bnh": ({}, (140.0, 50.0), (0.0, 4.0)),
    "osy": ({}, (0.0, 80.0), (-274.0, 4.0)),
}
"""Problem -> its size, references and ideal point. As many parameters as a training's search space;
the last two have fixed 2 and 6. References are worse than the whole front, so that random feasible
points count."""


class PymooProblem(Problem):
    """Test problem by name; every objective is minimised, every constraint is `<= 0`."""

    def __init__(self, name: str) -> None:
        from pymoo.problems import get_problem

        size, references, best = PYMOO[name]
        self.name = name
        self._problem = get_problem(name, **size)
        bounds = zip(self._problem.xl, self._problem.xu, strict=True)
        self.domains = {
            f"x{index}": Uniform(low=float(low), high=float(high))
            for index, (low, high) in enumerate(bounds, 1)
        }
        self.objectives = {
            f"f{index}": ObjectiveSpec(direction="minimize", reference=worst)
            for index, worst in enumerate(references, 1)
        }
        self.best = dict(zip(self.objectives, best, strict=True))
        count = self._problem.n_ieq_constr
        self.constraints = {f"g{i + 1}": Constraint(op="<=", bound=0.0) for i in range(count)}

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        del level
        point = np.array([params[name] for name in self.domains], dtype=np.float64)
        results = self._problem.evaluate(point, return_as_dictionary=True)
        values = [*results["F"], *results["G"]] if self.constraints else list(results["F"])
        return dict(zip([*self.objectives, *self.constraints], map(float, values), strict=True))


EVALUATION_COST = 2 * 128
"""Completions of a measurement: two samples of each validation prompt of the table."""
SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "math.yaml"
BOUND = ('constraints.correctness=">= 0.2"',)
"""The table has no untrained policy, to which the bound of the file refers."""


class Replayed(Problem):
    """Problem whose trainings are replayed from a table."""

    def __init__(
        self, spec: SweepSpec, curves: Curves, levels: tuple[int, ...], *, is_paid: bool = False
    ) -> None:
        """Fit the surrogates of a table to the space of a spec.

        Trials are measured at `levels`: some of the table's, with its last one; a ValueError says
        which are missing. If measurements are paid for, the policy at every level is a candidate.
        """
        if not set(levels) <= set(curves.levels) or levels[-1] != curves.levels[-1]:
            raise ValueError(f"levels {levels} are not all in the table, which has {curves.levels}")
        self.name, self.levels = spec.name, levels
        self.has_checkpoints, self.evaluation_cost = is_paid, EVALUATION_COST * is_paid
        self.domains = spec.space.searched_domains
        self.objectives, self.constraints = spec.objectives, spec.constraints
        metrics = list(dict.fromkeys([*self.objectives, *self.constraints]))
        infos = registry.describe_task(spec.task).metrics
        self._ranges = {name: (infos[name].low, infos[name].high) for name in metrics}
        goals = spec.objectives.items()
        self.best = {n: self._ranges[n][goal.direction == "maximize"] for n, goal in goals}
        self._points = np.array([encode_features(params, self.domains) for params in curves.params])
        self._cpu_seconds = dict(zip(curves.levels, curves.cpu_seconds.T, strict=True))
        self._fits: dict[tuple[str, int], Surrogate] = {}
        self._errors: dict[tuple[str, int], float] = {}
        for name in metrics:
            for level in levels:
                column = curves.levels.index(level)
                means, errors = curves.means[name][:, column], curves.errors[name][:, column]
                self._fits[name, level] = Surrogate(self._points, means, errors)
                self._errors[name, level] = float(np.median(errors))
        self._tests = {
            name: Surrogate(self._points, curves.test_means[name], curves.test_errors[name])
            for name in metrics
        }

    @staticmethod
    def load_shipped(*, is_paid: bool) -> Replayed:
        """Load the table that ships, measured at a third and at the end, or paid from there on."""
        curves = read_table()
        levels = choose_levels(curves.levels)
        chosen = levels if is_paid else (levels[0], levels[-1])
        return Replayed(load_spec(SPACE, BOUND), curves, chosen, is_paid=is_paid)

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """Draw a deviation of the training and errors of measurement for each metric."""
        point = encode_features(params, self.domains)
        of_training = {name: float(rng.standard_normal()) for name in self._tests}
        of_rungs = {
            level: {name: float(rng.standard_normal()) for name in self._tests}
            for level in self.levels
        }

        def measure(level: int) -> Estimates:
            estimates: dict[str, Estimate] = {}
            for name, draw in of_rungs[level].items():
                fit, error = self._fits[name, level], self._errors[name, level]
                value = fit.predict(point) + fit.deviation * of_training[name] + error * draw
                estimates[name] = Estimate(self._clip(name, value), error)
            return estimates

        return measure

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Predict the test values by their surrogates.

        There are none before the end: there they differ from the end as validation values do.
        """
        point, end = encode_features(params, self.domains), self.levels[-1]

        def predict_rest(name: str) -> float:
            if level == end:
                return 0.0
            return self._fits[name, end].predict(point) - self._fits[name, level].predict(point)

        return {
            name: self._clip(name, fit.predict(point) - predict_rest(name))
            for name, fit in self._tests.items()
        }

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Return the CPU seconds of the nearest configuration between two levels."""
        apart = np.linalg.norm(self._points - encode_features(params, self.domains), axis=1)
        row = int(np.argmin(apart))
        before = float(self._cpu_seconds[start][row]) if start else 0.0
        return float(self._cpu_seconds[end][row]) - before

    def _clip(self, name: str, value: float) -> float:
        return float(np.clip(value, *self._ranges[name]))


def choose_levels(available: tuple[int, ...]) -> tuple[int, ...]:
    """Return the levels from a third of the full budget on."""
    return tuple(level for level in available if 3 * level >= available[-1])


LENGTHS = (0.05, 50.0)
"""Bounds of the kernel's lengths: shorter ones fit noise, longer ones ignore a feature."""


def encode_features(params: Params, domains: Mapping[str, Choices | Uniform]) -> Floats:
    """Encode a configuration as `float[D]`."""
    columns: list[float] = []
    for name, domain in domains.items():
        value = params[name]
        if isinstance(domain, Choices):
            columns.extend(float(value == choice) for choice in domain.choices)
        else:
            low, high, number = float(domain.low), float(domain.high), float(value)
            if domain.log:
                low, high, number = math.log(low), math.log(high), math.log(number)
            columns.append((number - low) / (high - low))
    return np.array(columns)


class Surrogate:
    """Mean of a metric over the space, and the deviation of trainings from it."""

    def __init__(self, points: Floats, values: Floats, errors: Floats) -> None:
        """Fit the process through values `[C]`, each measured once, at points `[C, D]`."""
        self._centre, self._scale = float(values.mean()), float(values.std()) or 1.0
        kernel = ConstantKernel(1.0) * Matern(np.ones(points.shape[1]), LENGTHS, nu=2.5)
        self._process = GaussianProcessRegressor(
            kernel + WhiteKernel(0.05, (1e-5, 1.0)), alpha=(errors / self._scale) ** 2 + 1e-8
        )
        with warnings.catch_warnings():
            # A length at its bound is a valid result: the feature has no effect.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self._process.fit(points, (values - self._centre) / self._scale)
        self.deviation = self._scale * math.sqrt(self._process.kernel_.k2.noise_level)
        """Standard deviation of a training from the mean, without the error of measurement."""

    def predict(self, point: Floats) -> float:
        """Predict the mean at one point `[D]`."""
        return self._centre + self._scale * float(self._process.predict(point[None])[0])

    def predict_left_out(self) -> Floats:
        """Predict each value from all others, `float[C]`, with the fitted kernel.

        Source: Rasmussen and Williams 2006, Gaussian processes for machine learning, eq. 5.12.
        """
        lower = self._process.L_
        precision = np.linalg.inv(lower @ lower.T)
        targets = self._process.y_train_
        predicted = targets - self._process.alpha_ / np.diag(precision)
        return self._centre + self._scale * predicted


SHIPPED = Path(__file__).with_name("curves_math.parquet")
ERROR = ".se"
MEASURED = ("split", "step", "completions", "seconds", "cpu_seconds")
"""Columns between the parameters and the metrics."""


@dataclass(frozen=True)
class Curves:
    """Measurements of C configurations, at L levels and on test prompts, by metric."""

    params: tuple[Params, ...]
    levels: tuple[int, ...]
    """Completions, ascending; the last is the full budget."""
    means: Mapping[str, Floats]
    """`[C, L]`, on validation prompts."""
    errors: Mapping[str, Floats]
    test_means: Mapping[str, Floats]
    """`[C]`, at full budget."""
    test_errors: Mapping[str, Floats]
    cpu_seconds: Floats
    """`[C, L]`, since the start of the training, including evaluations."""


def read_table(path: Path = SHIPPED) -> Curves:
    """Read a table that `curves.py` has written; a ValueError says that it has gaps."""
    table = pd.read_parquet(path).sort_values(["configuration", "completions"])
    columns = list(table.columns)
    first = columns.index(MEASURED[0])
    metrics = [name for name in columns[first + len(MEASURED) :] if not name.endswith(ERROR)]
    test, rungs = table[table.split == "test"], table[table.split == "validation"]
    levels = tuple(sorted(map(int, rungs.completions.unique())))
    if len(rungs) != len(levels) * len(test):
        raise ValueError(f"{path}: {len(rungs)} rungs of {len(test)} x {len(levels)}")

    def read_curves(name: str) -> Floats:
        return rungs[name].to_numpy(np.float64).reshape(len(test), len(levels))

    return Curves(
        params=tuple(test[columns[1:first]].to_dict("records")),
        levels=levels,
        means={name: read_curves(name) for name in metrics},
        errors={name: read_curves(name + ERROR) for name in metrics},
        test_means={name: test[name].to_numpy(np.float64) for name in metrics},
        test_errors={name: test[name + ERROR].to_numpy(np.float64) for name in metrics},
        cpu_seconds=read_curves("cpu_seconds"),
    )
