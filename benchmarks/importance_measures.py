"""Measures of the importance of parameters that `importance.py` compares.

Each returns parameter -> importance for one objective of a simulated sweep; only ranks count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import optuna
from importance_problems import Case, Floats
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.importance import (
    BaseImportanceEvaluator,
    FanovaImportanceEvaluator,
    PedAnovaImportanceEvaluator,
    get_param_importances,
)
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.inspection import permutation_importance

from gdpo_tune.analysis.response import Dimension, Encoder
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.results.dimensions import list_dimensions

Measure = Callable[[Case, str], dict[str, float]]
POINTS = 512


def measure_linear(case: Case, objective: str) -> dict[str, float]:
    """Measure partial eta squared of a linear model with squares: the measure until 2026."""
    dimensions = list_dimensions(case.spec.space)
    blocks = [_build_linear_columns(dimension, case.records) for dimension in dimensions]
    values = _list_values(case.records, objective)
    whole = _fit_residual(np.hstack(blocks), values)
    shares: dict[str, float] = {}
    for i, dimension in enumerate(dimensions):
        without = _fit_residual(np.hstack(blocks[:i] + blocks[i + 1 :]), values)
        shares[dimension.name] = 1 - whole / without
    return shares


def _build_linear_columns(dimension: Dimension, records: Sequence[TrialRecord]) -> Floats:
    places = np.array([dimension.convert(record.params[dimension.name]) for record in records])
    if dimension.choices:
        return (places[:, None] == np.arange(1, len(dimension.choices))).astype(float)
    return np.column_stack([places, places**2])


def _fit_residual(columns: Floats, values: Floats) -> float:
    columns = np.column_stack([np.ones(len(values)), columns])
    rest = values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
    return float(rest @ rest)


def measure_optuna(
    evaluator: BaseImportanceEvaluator, case: Case, objective: str
) -> dict[str, float]:
    """Measure with an evaluator of Optuna, as `optuna.importance` is used."""
    dimensions = list_dimensions(case.spec.space)
    distributions = {d.name: _build_distribution(d) for d in dimensions}
    study = optuna.create_study(direction="maximize")
    for record in case.records:
        trial = optuna.create_trial(
            params={name: record.params[name] for name in distributions},
            distributions=distributions,
            value=record.test[objective].mean,
        )
        study.add_trial(trial)
    return dict(get_param_importances(study, evaluator=evaluator))


def _build_distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def measure_sobol(case: Case, objective: str) -> dict[str, float]:
    """Measure total Sobol indices of the mean of one Gaussian process, fitted by scikit-learn."""
    dimensions = list_dimensions(case.spec.space)
    encoder = Encoder(dimensions)
    rows = np.array([encoder.convert(record.params) for record in case.records])
    values = _list_values(case.records, objective)
    features = _build_forest_features(encoder, rows)
    kernel = ConstantKernel(1.0) * Matern(np.ones(features.shape[1]), (0.1, 100.0), nu=2.5)
    process = GaussianProcessRegressor(
        kernel + WhiteKernel(0.1, (1e-4, 1.0)),
        normalize_y=True,
        n_restarts_optimizer=2,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(features, values)
    points = encoder.draw_points(POINTS)
    left, right = points[:, : len(dimensions)], points[:, len(dimensions) :]
    base = process.predict(_build_forest_features(encoder, left))
    shares: dict[str, float] = {}
    for i, dimension in enumerate(dimensions):
        moved = left.copy()
        moved[:, i] = right[:, i]
        change = base - process.predict(_build_forest_features(encoder, moved))
        shares[dimension.name] = float((change**2).mean())
    return shares


def measure_permutation(case: Case, objective: str) -> dict[str, float]:
    """Measure the loss of a random forest's fit when a parameter's values are shuffled."""
    dimensions = list_dimensions(case.spec.space)
    encoder = Encoder(dimensions)
    rows = np.array([encoder.convert(record.params) for record in case.records])
    values = _list_values(case.records, objective)
    forest = RandomForestRegressor(200, random_state=0, min_samples_leaf=2).fit(rows, values)
    found = permutation_importance(forest, rows, values, n_repeats=20, random_state=0)
    return {d.name: float(v) for d, v in zip(dimensions, found.importances_mean, strict=True)}


def _build_forest_features(encoder: Encoder, rows: Floats) -> Floats:
    """Return a column for each number and name, 0 where a parameter has no effect."""
    active = encoder.find_active(rows)
    columns: list[Floats] = []
    for i, dimension in enumerate(encoder.dimensions):
        if dimension.choices:
            names = np.arange(len(dimension.choices))
            columns.append((rows[:, i, None] == names) * active[:, i, None])
        else:
            columns.append((rows[:, i] * active[:, i])[:, None])
    return np.hstack(columns)


def _list_values(records: Sequence[TrialRecord], objective: str) -> Floats:
    return np.array([record.test[objective].mean for record in records])


MEASURES: dict[str, Measure] = {
    "linear model (until 2026)": measure_linear,
    "optuna fanova": lambda c, o: measure_optuna(FanovaImportanceEvaluator(seed=0), c, o),
    "optuna ped-anova": lambda c, o: measure_optuna(PedAnovaImportanceEvaluator(), c, o),
    "forest, permuted": measure_permutation,
    "process, total sobol": measure_sobol,
}
