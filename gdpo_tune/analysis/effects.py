"""Effect of each searched dimension on each objective, where most trainings were measured equally.

The data are the trainings that were measured on validation prompts at one step, the step at which
most configurations were. So all have equally many completions, whether they went on or not.

    y = intercept + sum_d effect_d(x_d) + e       one linear model per objective, least squares

A choice has an effect of its own, a range a slope on its own scale, and a parameter without effect
under the other values of a configuration none. A question is a difference of the model: between two
choices of a dimension, or between both ends of a range. Interactions and curves count as noise.

    s_j^2     residual variance of objective j, with n - rank degrees of freedom
    f_j^2     mean of the squared standard errors of its evaluations
    s^2       (df s_j^2 + 2 p_j f_j^2) / (df + 2), at least f_j^2: p_j is the mean of
              max(1, s_i^2 / f_i^2) over the other objectives

The other objectives count as 2 degrees of freedom, since the noise of training differs between them
by more than the noise of evaluations. Evaluations as a floor keep a perfect fit from being certain.
Intervals hold at 95 % for all questions together: they reach as far as the largest |t| of all
questions of all objectives, by draws from their joint distribution.

`benchmarks/effects.py` measures level and power where the truth is known: docs/importance.md.

Source: Hothorn, Bretz and Westfall 2008, Simultaneous inference in general parametric models;
Smyth 2004, Linear models and empirical Bayes methods.

Shapes: N trainings, P coefficients, Q questions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.analysis.uncertainty import LEVEL, Interval
from gdpo_tune.core.text import NOISE, format_parameter
from gdpo_tune.core.trials import Estimate, Objective, Params, ParamValue, TrialRecord

PRIOR_DF, MIN_DF = 2, 3
"""Degrees of freedom that the other objectives count as, and that a fit needs of its own."""
DRAWS = 20_000
WORTH_FINDING = 2.0
"""Smallest difference whose cost is named, in standard deviations between trainings."""
MAX_MORE = 999
"""Most trainings that are named as a cost."""
UNKNOWN = Estimate(math.nan, math.nan)
TOLERANCE = 1e-8
"""Share up to which a direction counts as absent: of the data, or of a question outside of them."""


@dataclass(frozen=True)
class Dimension:
    """One searched parameter and its domain."""

    name: str
    choices: tuple[ParamValue, ...] = ()
    """Empty: a number from `low` to `high`."""
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    when: Mapping[str, tuple[ParamValue, ...]] | None = None
    """Searched parameters and their values under which this one has an effect; None: always."""

    @property
    def size(self) -> int:
        """Number of columns."""
        return len(self.choices) or 1

    def encode(self, value: ParamValue) -> list[float]:
        """Return the columns of a value; a ValueError if it lies outside."""
        if self.choices:
            place = self.choices.index(value)
            return [float(place == i) - 1 / len(self.choices) for i in range(len(self.choices))]
        low, high, number = self.low, self.high, float(value)
        if not low * (1 - 1e-9) <= number <= high * (1 + 1e-9):
            raise ValueError(f"{self.name} = {value} is not in {low} to {high}")
        if self.log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return [2 * (number - low) / (high - low) - 1]

    def list_pairs(self) -> list[tuple[str, str, list[float], float]]:
        """Return two values, the difference of their columns, and its variance in a plain design.

        The variance is that of one training with unit noise, if values are drawn uniformly.
        """
        if not self.choices:
            return [(format_parameter(self.low), format_parameter(self.high), [2.0], 12.0)]
        names, columns = [format_parameter(v) for v in self.choices], np.eye(self.size)
        return [
            (names[i], names[j], list(columns[j] - columns[i]), 2.0 * self.size)
            for j in range(self.size)
            for i in range(j)
        ]


class Contrast(NamedTuple):
    """The difference of an objective between two values of a dimension, all else equal."""

    dimension: str
    before: str
    """The first choice, or the low end of a range."""
    after: str
    objective: str
    value: float
    """NaN if the data do not tell."""
    interval: Interval
    """At 95 % for all differences of a sweep together; infinite if the data do not tell."""
    more: int
    """Further trainings to the same step that would tell it apart, up to `MAX_MORE`, if it is as
    large as it seems, or as `WORTH_FINDING`; 0 if these would do."""

    @property
    def is_told_apart(self) -> bool:
        """True if the interval excludes 0."""
        return self.interval.low > 0 or self.interval.high < 0


@dataclass(frozen=True)
class Effects:
    """The differences that each dimension makes at one step."""

    contrasts: tuple[Contrast, ...] = ()
    """By dimension, then by objective that varied."""
    step: int = 0
    completions: int = 0
    """Completions of one training by then."""
    trainings: int = 0
    """Trainings that were measured there, replicates included."""
    constant: tuple[str, ...] = ()
    """Objectives with one value in all trainings, of which there are several."""


class _Fit(NamedTuple):
    values: Floats
    """Estimated answers, `[Q]`; NaN where the data do not tell."""
    weights: Floats
    """Weight of each training in each answer, `[Q, N]`."""
    df: int
    variance: float
    floor: float


def estimate_effects(
    records: Sequence[TrialRecord], objectives: Sequence[Objective], dimensions: Sequence[Dimension]
) -> Effects:
    """Estimate what every dimension changes in every objective, with simultaneous intervals.

    Trainings outside of the space, such as a published setting, do not count; a value of NaN counts
    as not measured.
    """
    trained = [r for r in records if r.is_training]
    counts = Counter(
        rung.step for r in trained if r.role != "replicate" for rung in r.rungs if rung.validation
    )
    step = max(counts, key=lambda step: (counts[step], step), default=0)
    found = [
        (row, rung)
        for record in trained
        for rung in record.rungs
        if rung.step == step and rung.validation
        if (row := _build_row(dimensions, record.params)) is not None
    ]
    if not found or not dimensions:
        return Effects()
    design = np.array([row for row, _ in found])
    pairs = [(d.name, *pair) for d in dimensions for pair in d.list_pairs()]
    questions = np.zeros((len(pairs), design.shape[1]))
    ends = np.cumsum([1, *(d.size for d in dimensions)])
    starts = {d.name: int(end) for d, end in zip(dimensions, ends[:-1], strict=True)}
    for row, (name, _, _, columns, _) in zip(questions, pairs, strict=True):
        row[starts[name] : starts[name] + len(columns)] = columns
    fits: dict[str, _Fit] = {}
    constant: list[str] = []
    for name in (objective.name for objective in objectives):
        estimates = [rung.validation.get(name, UNKNOWN) for _, rung in found]
        values = np.array([estimate.mean for estimate in estimates])
        errors = np.array([estimate.se for estimate in estimates])
        kept = np.isfinite(values)
        if kept.sum() > 1 and np.ptp(values[kept]) <= NOISE * np.max(np.abs(values[kept])):
            constant.append(name)
        elif kept.any():
            fits[name] = _fit(design[kept], values[kept], errors[kept], questions)
    size = 1 + sum(max(1, dimension.size - 1) for dimension in dimensions)
    answers = {name: _answer(name, fits, [p[-1] for p in pairs], size) for name in fits}
    contrasts = [
        Contrast(dimension, before, after, name, *answers[name][index])
        for index, (dimension, before, after, *_) in enumerate(pairs)
        for name in fits
    ]
    completions = round(float(np.median([rung.completions for _, rung in found])))
    return Effects(tuple(contrasts), step, completions, len(found), tuple(constant))


def _build_row(dimensions: Sequence[Dimension], params: Params) -> list[float] | None:
    active: dict[str, bool] = {}
    row = [1.0]
    for d in dimensions:
        when = (d.when or {}).items()
        active[d.name] = d.name in params and all(active[p] and params[p] in v for p, v in when)
        try:
            row += d.encode(params[d.name]) if active[d.name] else [0.0] * d.size
        except ValueError:  # the published weights may lie outside
            return None
    return row


def _fit(design: Floats, values: Floats, errors: Floats, questions: Floats) -> _Fit:
    left, singular, right = np.linalg.svd(design, full_matrices=False)
    kept = singular > TOLERANCE * singular[0]
    left, singular, right = left[:, kept], singular[kept], right[kept]
    rest, df = values - left @ (left.T @ values), len(values) - len(singular)
    outside = np.linalg.norm(questions - questions @ right.T @ right, axis=1)
    weights = (questions @ right.T / singular) @ left.T
    told = (outside <= TOLERANCE * np.linalg.norm(questions, axis=1)) & (df >= MIN_DF)
    known = errors[np.isfinite(errors)]
    return _Fit(
        np.where(told, weights @ values, np.nan),
        weights,
        df,
        float(rest @ rest) / df if df else 0.0,
        float((known**2).mean()) if len(known) else 0.0,
    )


def _answer(
    name: str, fits: Mapping[str, _Fit], plain: Sequence[float], size: int
) -> list[tuple[float, Interval, int]]:
    """Return value, interval and missing trainings of each question about an objective.

    `plain` has the variances of `Dimension.list_pairs`, `size` the coefficients of a full model.
    """
    fit, count = fits[name], fits[name].weights.shape[1]
    told = np.isfinite(fit.values)
    others = [f for n, f in fits.items() if n != name and f.floor and f.df >= MIN_DF]
    prior = PRIOR_DF if others and fit.floor else 0
    ratio = np.mean([max(1.0, f.variance / f.floor) for f in others]) if prior else 0.0
    variance = (fit.df * fit.variance + prior * ratio * fit.floor) / max(1, fit.df + prior)
    deviation = math.sqrt(max(variance, fit.floor))
    level = LEVEL ** (1 / len(fits))  # of independent objectives; of others it is more
    alpha, spreads = (1 - level) / len(plain), np.linalg.norm(fit.weights, axis=1)
    quantile = math.inf
    if told.any():
        quantile = _draw_quantile(fit.weights[told], fit.df + prior, level)
        alpha = float(2 * stdtr(fit.df + prior, -quantile))  # of one question
    answers: list[tuple[float, Interval, int]] = []
    for value, spread, usual, is_told in zip(fit.values, spreads, plain, told, strict=True):
        reach = float(quantile * spread * deviation) if is_told else math.inf
        interval = Interval(-math.inf, math.inf)
        if is_told:
            interval = Interval(float(value - reach), float(value + reach))
        unit = count * spread**2 if is_told else usual
        target = max(WORTH_FINDING, abs(value) / deviation if is_told and deviation else 0.0)
        df = fit.df if is_told else count - size
        more = _count_more(count, df, prior, alpha, unit / target**2)
        answers.append((float(value), interval, more))
    return answers


def _draw_quantile(weights: Floats, df: int, level: float) -> float:
    """Return the quantile of the largest |t| of answers with these weights `[Q, N]`."""
    left, singular, _ = np.linalg.svd(weights, full_matrices=False)
    kept = singular > TOLERANCE * singular[0]
    scores = (left * singular)[:, kept] / np.linalg.norm(weights, axis=1)[:, None]
    rng = np.random.default_rng(0)
    largest = np.abs(rng.standard_normal((DRAWS, kept.sum())) @ scores.T).max(axis=1)
    return float(np.quantile(largest / np.sqrt(rng.chisquare(df, DRAWS) / df), level))


def _count_more(count: int, df: int, prior: int, alpha: float, unit: float) -> int:
    """Return how many more trainings it takes until an interval is as short as a difference.

    `unit` is the variance of the answer with one training, over the square of the difference.
    """
    for more in range(MAX_MORE):
        if df + more >= MIN_DF:
            quantile = stdtrit(df + more + prior, 1 - alpha / 2)
            if quantile**2 * unit <= count + more:
                return more
    return MAX_MORE
