"""Table of real learning curves as a search problem.

A surrogate, a Gaussian process for each metric and level, interpolates between the configurations
of the table. A replayed trial adds two random parts to its mean: one deviation of the training for
each metric, equal at all rungs in units of the level's own spread, and at every rung an error of
measurement as large as the table's standard errors there. Values stay within the metric's range.
The true values are the means of the process through the test values. A trial takes as long as the
nearest configuration of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from problems import Curve, Estimates
from surrogate import Floats, Surrogate, encode_features, find_nearest
from table import SHIPPED, Curves, read_table

from gdpo_tune.core import registry
from gdpo_tune.core.trials import Estimate, Params
from gdpo_tune.spec import (
    AshaSettings,
    Choices,
    Constraint,
    ObjectiveSpec,
    SweepSpec,
    Uniform,
    load_spec,
)

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
        rungs: tuple[int, ...] | None = None,
        evaluation_cost: int = 0,
    ) -> None:
        """Fit the surrogates.

        Args:
            spec: spec with the space of the table's configurations.
            curves: the table.
            levels: levels at which trials are measured; some of the table's, with its last one.
            rungs: levels at which schedulers compare trials. With them the policy at every level is
                a candidate; without them, trials are compared at all, and only ends are candidates.
            evaluation_cost: completions of a measurement.

        Raises:
            ValueError: the table does not have one of the levels.
        """
        if not set(levels) <= set(curves.levels) or levels[-1] != curves.levels[-1]:
            raise ValueError(f"levels {levels} are not all in the table, which has {curves.levels}")
        self.name = spec.name
        self.levels = levels
        self.rungs = levels[:-1] if rungs is None else rungs
        self.has_checkpoints = rungs is not None
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
        """Load the table that ships, with the default rungs as levels; only ends are candidates."""
        curves = read_table(SHIPPED)
        return Replayed(load_spec(SPACE, BOUND), curves, choose_levels(curves.levels))

    @staticmethod
    def load_checkpoints() -> Replayed:
        """Load the table that ships, measured from the first default rung on.

        The policy at every level is a candidate, and every measurement is paid for.
        """
        curves = read_table(SHIPPED)
        rungs = choose_levels(curves.levels)[:-1]
        levels = tuple(level for level in curves.levels if level >= rungs[0])
        return Replayed(load_spec(SPACE, BOUND), curves, levels, rungs, EVALUATION_COST)

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """Draw one training."""
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


def choose_levels(
    available: tuple[int, ...], grace_share: float = AshaSettings().grace
) -> tuple[int, ...]:
    """Return the levels nearest to those of halving by 3, from the full budget down."""
    full, wanted = available[-1], [1.0]
    while wanted[-1] / 3 >= grace_share:
        wanted.append(wanted[-1] / 3)
    return tuple(
        sorted({min(available, key=lambda level: abs(level - share * full)) for share in wanted})
    )
