"""Problems of the search benchmarks: configurations with a learning curve each.

A problem returns a `Curve` for each trial, so that the random parts of a training (its seed, the
prompts of its measurements) belong to one trial.

    branin_currin  two objectives that trade off, with a fidelity. Source: Irshad, Karsch and Doepp
                   2021, Expected hypervolume improvement for simultaneous multi-objective and
                   multi-fidelity optimization (arXiv 2112.13901), as in BoTorch's
                   `MOMFBraninCurrin`: objectives (21 - branin) / 22 and (14 - currin) / 15
    pymoo          without fidelity: one measurement at the end of a trial
    replayed       a table of real learning curves, `curves_math.parquet`. A row is one measurement
                   of one configuration after a number of completions, on validation prompts or, at
                   the end, on test prompts. `<metric>` is a mean, `<metric>.se` its standard error

A surrogate, a Gaussian process for each metric and level, interpolates between the configurations
of the table. A replayed trial adds two random parts to its mean: one deviation of the training for
each metric, equal at all rungs in units of the level's own spread, and at every rung an error of
measurement as large as the table's standard errors there. Values stay within the metric's range.
The true values are the means of the process through the test values. A trial takes as long as the
nearest configuration of the table.

Shapes: M objectives, C configurations, D features: one in [0, 1] for each number, on its own scale,
and one in {0, 1} for each choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from gdpo_tune.core import registry
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import Estimate, Params
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import Constraint, ObjectiveSpec, Search
from gdpo_tune.spec.space import Choices, Space, Uniform

Floats = NDArray[np.float64]
Estimates = Mapping[str, Estimate]
Curve = Callable[[int], Estimates]
"""Completions sampled so far -> estimates that the search sees then."""


class Problem(Protocol):
    """Problem whose trials run in simulated time."""

    name: str
    levels: tuple[int, ...]
    """Completions at which a trial is measured; the last is the full budget."""
    has_checkpoints: bool
    """True if the policy at every level is a candidate; False if only the end of a trial is."""
    evaluation_cost: int
    """Completions of a measurement, which the budget pays."""
    domains: Mapping[str, Choices | Uniform]
    """Searched parameters, each with more than one value."""
    objectives: Mapping[str, ObjectiveSpec]
    best: Mapping[str, float]
    """Objective -> bound of its best value; with the references, the box of the hypervolume."""
    constraints: Mapping[str, Constraint]

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve: ...

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Compute every objective and constrained metric at a level, without noise."""
        ...

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Compute the seconds of a trial from one level to another."""
        ...


def compute_full_cost(problem: Problem) -> int:
    """Compute the completions of a trial with its full budget and all of its measurements."""
    return problem.levels[-1] + problem.evaluation_cost * len(problem.levels)


def build_spec(problem: Problem, search: Search) -> SweepSpec:
    return SweepSpec(
        name=problem.name,
        task=problem.name,
        policy=problem.name,
        objectives=dict(problem.objectives),
        constraints=dict(problem.constraints),
        space=Space(domains=dict(problem.domains)),
        search=search,
    )


def build_exact_estimates(values: Mapping[str, float]) -> Estimates:
    return {name: Estimate(float(value), 0.0) for name, value in values.items()}


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
        del params
        return float(end - start)


EVALUATION_COST = 2 * 128
"""Completions of a measurement: two samples of each validation prompt of the table."""
SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "math.yaml"
BOUND = ('constraints.correctness=">= 0.2"',)
"""The table has no untrained policy, to which the bound of the file refers."""


class Replayed:
    """Problem whose trainings are replayed from a table."""

    def __init__(
        self,
        spec: SweepSpec,
        curves: Curves,
        levels: tuple[int, ...],
        evaluation_cost: int = 0,
        *,
        has_checkpoints: bool = False,
    ) -> None:
        """Fit the surrogates.

        Args:
            spec: spec with the space of the table's configurations.
            curves: the table.
            levels: levels at which trials are measured; some of the table's, with its last one.
            evaluation_cost: completions of a measurement.
            has_checkpoints: whether the policy at every level is a candidate.

        Raises:
            ValueError: the table does not have one of the levels.
        """
        if not set(levels) <= set(curves.levels) or levels[-1] != curves.levels[-1]:
            raise ValueError(f"levels {levels} are not all in the table, which has {curves.levels}")
        self.name = spec.name
        self.levels = levels
        self.has_checkpoints = has_checkpoints
        self.evaluation_cost = evaluation_cost
        self.domains: Mapping[str, Choices | Uniform] = spec.space.searched_domains
        self.objectives: Mapping[str, ObjectiveSpec] = spec.objectives
        self.constraints: Mapping[str, Constraint] = spec.constraints
        infos = registry.describe_task(spec.task).metrics
        self._ranges = {n: (infos[n].low, infos[n].high) for n in self._list_metrics()}
        self.best: Mapping[str, float] = {
            name: self._ranges[name][goal.direction == "maximize"]
            for name, goal in spec.objectives.items()
        }
        self._points = np.array([encode_features(params, self.domains) for params in curves.params])
        self._cpu_seconds = {
            level: curves.cpu_seconds[:, column] for column, level in enumerate(curves.levels)
        }
        self._surrogates: dict[tuple[str, int], Surrogate] = {}
        self._errors: dict[tuple[str, int], float] = {}
        for name in self._list_metrics():
            for level in levels:
                column = curves.levels.index(level)
                errors = curves.errors[name][:, column]
                self._surrogates[name, level] = self._fit(curves.means[name][:, column], errors)
                self._errors[name, level] = float(np.median(errors))
        self._tests = {
            name: self._fit(curves.test_means[name], curves.test_errors[name])
            for name in self._list_metrics()
        }

    @staticmethod
    def load_shipped() -> Replayed:
        """Load the table that ships, measured at a third and at the end; only ends count."""
        curves = read_table(SHIPPED)
        levels = choose_levels(curves.levels)
        return Replayed(load_spec(SPACE, BOUND), curves, (levels[0], levels[-1]))

    @staticmethod
    def load_checkpoints() -> Replayed:
        """Load the table that ships, measured from a third of a trial on.

        The policy at every level is a candidate, and every measurement is paid for.
        """
        curves = read_table(SHIPPED)
        levels = choose_levels(curves.levels)
        return Replayed(
            load_spec(SPACE, BOUND), curves, levels, EVALUATION_COST, has_checkpoints=True
        )

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        point = encode_features(params, self.domains)
        of_training = {name: float(rng.standard_normal()) for name in self._list_metrics()}
        of_rungs = {
            level: {name: float(rng.standard_normal()) for name in self._list_metrics()}
            for level in self.levels
        }

        def measure(level: int) -> Estimates:
            return {
                name: self._estimate(name, level, point, of_training[name], draw)
                for name, draw in of_rungs[level].items()
            }

        return measure

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Predict the test values by their surrogates.

        There are none before the end: there they differ from the end as validation values do.
        """
        point = encode_features(params, self.domains)
        return {
            name: self._clip(name, fit.predict(point) - self._predict_rest(name, level, point))
            for name, fit in self._tests.items()
        }

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Return the CPU seconds of the nearest configuration between two levels."""
        row = find_nearest(encode_features(params, self.domains), list(self._points))
        before = float(self._cpu_seconds[start][row]) if start else 0.0
        return float(self._cpu_seconds[end][row]) - before

    def _predict_rest(self, name: str, level: int, point: Floats) -> float:
        """Predict the change of a validation value from a level to the end."""
        end = self.levels[-1]
        if level == end:
            return 0.0
        fits = (self._surrogates[name, end], self._surrogates[name, level])
        return fits[0].predict(point) - fits[1].predict(point)

    def _estimate(
        self, name: str, level: int, point: Floats, of_training: float, draw: float
    ) -> Estimate:
        fit, error = self._surrogates[name, level], self._errors[name, level]
        value = fit.predict(point) + fit.deviation * of_training + error * draw
        return Estimate(self._clip(name, value), error)

    def _fit(self, values: Floats, errors: Floats) -> Surrogate:
        return Surrogate(self._points, values, errors)

    def _clip(self, name: str, value: float) -> float:
        return float(np.clip(value, *self._ranges[name]))

    def _list_metrics(self) -> list[str]:
        return list(dict.fromkeys([*self.objectives, *self.constraints]))


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
        """Fit the process.

        Args:
            points: `[C, D]`.
            values: `[C]`, each measured once.
            errors: `[C]`, standard errors of the values.
        """
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


def compute_r_squared(values: Floats, predicted: Floats) -> float:
    """Compute the share of the variance of `values` that a prediction explains; NaN without any."""
    if np.ptp(values) == 0:
        return math.nan
    return 1 - float(((values - predicted) ** 2).sum() / ((values - values.mean()) ** 2).sum())


def find_nearest(point: Floats, points: Sequence[Floats]) -> int:
    """Return the index of the closest of several points."""
    return int(np.argmin([np.linalg.norm(point - other) for other in points]))


SHIPPED = Path(__file__).with_name("curves_math.parquet")
ERROR = ".se"
MEASURED = ("split", "step", "completions", "seconds", "cpu_seconds")
"""Columns between the parameters and the metrics."""


@dataclass(frozen=True)
class Curves:
    """Measurements of C configurations, at L levels and on test prompts."""

    params: tuple[Params, ...]
    """Searched parameters of each of C configurations."""
    levels: tuple[int, ...]
    """Completions, ascending; the last is the full budget."""
    means: Mapping[str, Floats]
    """Metric -> `[C, L]`, on validation prompts."""
    errors: Mapping[str, Floats]
    """Standard errors of `means`."""
    test_means: Mapping[str, Floats]
    """Metric -> `[C]`, at full budget."""
    test_errors: Mapping[str, Floats]
    cpu_seconds: Floats
    """`[C, L]`, since the start of the training, including evaluations."""


def write_table(
    jobs: Sequence[Mapping[str, Any]], trainings: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Write trainings as Parquet, configuration by configuration, atomically."""
    rows = [
        _build_row(job["configuration"], training["params"], measured)
        for job, training in zip(jobs, trainings, strict=True)
        for measured in (*training["rungs"], training["test"])
    ]
    file = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    write_atomically(path, file.getvalue())


def _build_row(configuration: int, params: Params, measured: Mapping[str, Any]) -> dict[str, Any]:
    means = {name: mean for name, (mean, _) in measured["values"].items()}
    errors = {f"{name}{ERROR}": error for name, (_, error) in measured["values"].items()}
    about = {name: measured[name] for name in MEASURED}
    return {"configuration": configuration, **params, **about, **means, **errors}


def read_table(path: Path = SHIPPED) -> Curves:
    """Read a table.

    Raises:
        SystemExit: the file does not exist.
        ValueError: a configuration was not measured at every level.
    """
    if not path.exists():
        raise SystemExit(f"{path} does not exist; python {SHIPPED.parent / 'curves.py'} makes it")
    table = pq.read_table(path)
    columns = table.column_names
    first = columns.index(MEASURED[0])
    names, metrics = columns[1:first], columns[first + len(MEASURED) :]
    metrics = [name for name in metrics if not name.endswith(ERROR)]
    validation = [row for row in table.to_pylist() if row["split"] == "validation"]
    test = [row for row in table.to_pylist() if row["split"] == "test"]
    levels = tuple(sorted({row["completions"] for row in validation}))
    if len(validation) != len(levels) * len(test):
        raise ValueError(f"{path}: {len(validation)} rungs of {len(test)} x {len(levels)}")
    validation.sort(key=lambda row: (row["configuration"], row["completions"]))
    test.sort(key=lambda row: row["configuration"])

    def read_curves(name: str) -> Floats:
        values = np.array([row[name] for row in validation], dtype=np.float64)
        return values.reshape(len(test), len(levels))

    def read_ends(name: str) -> Floats:
        return np.array([row[name] for row in test], dtype=np.float64)

    return Curves(
        params=tuple({name: row[name] for name in names} for row in test),
        levels=levels,
        means={name: read_curves(name) for name in metrics},
        errors={name: read_curves(name + ERROR) for name in metrics},
        test_means={name: read_ends(name) for name in metrics},
        test_errors={name: read_ends(name + ERROR) for name in metrics},
        cpu_seconds=read_curves("cpu_seconds"),
    )
