"""Gaussian process through noisy measurements, to interpolate the configurations of a table.

Shapes: C configurations, D features: one in [0, 1] for each number, on its own scale, and one in
{0, 1} for each choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from gdpo_tune.core.trials import Params
from gdpo_tune.spec import Choices, Uniform

Floats = NDArray[np.float64]
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
