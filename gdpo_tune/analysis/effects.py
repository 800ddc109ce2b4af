"""Effects of each searched parameter on each objective, with their uncertainty.

For each objective a linear model of test means over the N trained configurations. A numeric
parameter has two terms, its value and its square (on a log scale where it spans a factor of 5); a
parameter of names has one term for each name. A parameter's importance is the share of the variance
that remains after the other parameters and that it explains (partial eta squared). The F test
compares the models with and without it; the interval is that of the test's noncentrality. Effects
of parameters that the search moved together do not count twice. Interactions count as noise.

Source: Smithson 2001, Correct confidence intervals for various regression effect sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from scipy import optimize, special

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.analysis.probability import LEVEL, Interval
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.resampling import correct_p_values
from gdpo_tune.core.trial_config import ParamValue
from gdpo_tune.core.trials import Objective

WIDE = 5.0
"""Ratio of the largest to the smallest value from which a parameter counts on a log scale."""
SPARE = 4
"""Configurations beyond the model's terms that are needed to separate effects from noise."""


@dataclass(frozen=True)
class Change:
    """The change of an objective when one parameter moves and the others stay."""

    before: str
    """Value that the parameter moves from: the smallest, or the first name."""
    after: str
    difference: float
    interval: Interval


@dataclass(frozen=True)
class ParameterEffect:
    """The effect of one parameter on one objective."""

    parameter: str
    objective: str
    importance: float
    """Share of the remaining variance, 0 to 1."""
    interval: Interval
    p: float
    """Under no effect at all; corrected for all parameters and objectives of the sweep."""
    changes: tuple[Change, ...]
    """For numbers one change, from the smallest to the largest; for names a change from the first
    to each other one. A change that always came with that of another parameter is confounded and
    left out."""


@dataclass(frozen=True)
class Effects:
    """Effects of every parameter on every objective."""

    estimates: tuple[ParameterEffect, ...]
    """Empty if there are too few configurations."""
    configurations: int
    needed: int
    """Configurations from which effects can be measured."""


@dataclass(frozen=True)
class _Term:
    """The columns of one parameter, and the contrasts that give its changes."""

    columns: Floats
    """`[N, k]`, centred."""
    contrasts: tuple[tuple[str, str, Floats], ...]
    """Before, after, and the change of each column."""


def estimate_effects(
    configurations: Sequence[Configuration],
    dimensions: Sequence[str],
    objectives: Sequence[Objective],
) -> Effects:
    """Estimate the effects of the parameters `dimensions`; one with a single value is left out."""
    trained = [c for c in configurations if c.is_training]
    if not trained:
        return Effects((), 0, 1 + SPARE)
    terms = {name: _build_term([c.params.get(name) for c in trained]) for name in dimensions}
    terms = {name: term for name, term in terms.items() if term.columns.shape[1]}
    needed = 1 + sum(term.columns.shape[1] for term in terms.values()) + SPARE
    if len(trained) < needed or not terms:
        return Effects((), len(trained), needed)
    raw = [
        _estimate_effect(
            name, goal.name, terms, np.array([c.mean[goal.name].mean for c in trained])
        )
        for goal in objectives
        for name in terms
    ]
    corrected = correct_p_values([effect.p for effect in raw])
    return Effects(
        tuple(replace(effect, p=p) for effect, p in zip(raw, corrected, strict=True)),
        len(trained),
        needed,
    )


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether values spread over a factor of `WIDE`, all above 0."""
    return min(values) > 0 and max(values) / min(values) >= WIDE


def _build_term(values: Sequence[ParamValue | None]) -> _Term:
    numbers = [value for value in values if _is_number(value)]
    if len(set(numbers)) > 2:
        return _build_numeric_term(values, numbers)
    # Numbers by their size, names by the alphabet.
    names = sorted({str(value) for value in values}, key=lambda name: (len(name), name))
    if len(numbers) < len(values):
        names.sort()
    columns = np.array([[float(str(v) == name) for name in names[1:]] for v in values])
    columns = columns.reshape(len(values), -1)
    unit = np.eye(len(names) - 1)
    contrasts = tuple((names[0], name, unit[i]) for i, name in enumerate(names[1:]))
    return _Term(columns - columns.mean(axis=0), contrasts)


def _build_numeric_term(values: Sequence[ParamValue | None], numbers: Sequence[float]) -> _Term:
    low, high = float(min(numbers)), float(max(numbers))
    log = is_logarithmic(numbers)

    def scale(value: float) -> float:
        """Return -1 for the smallest value, 1 for the largest."""
        a, b, v = (math.log(x) if log else x for x in (low, high, value))
        return 2 * (v - a) / (b - a) - 1

    # A configuration without this parameter stands in the middle.
    scaled = np.array([scale(float(v)) if _is_number(v) else 0.0 for v in values])
    columns = np.column_stack([scaled, scaled**2])
    contrast = (f"{low:.3g}", f"{high:.3g}", np.array([2.0, 0.0]))
    return _Term(columns - columns.mean(axis=0), (contrast,))


def _is_number(value: ParamValue | None) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _estimate_effect(
    name: str, objective: str, terms: dict[str, _Term], values: Floats
) -> ParameterEffect:
    """Estimate one effect; its p is not corrected yet."""
    centred = values - values.mean()
    whole = np.hstack([term.columns for term in terms.values()])
    others = [term.columns for other, term in terms.items() if other != name]
    rest, rank = _fit_residual(whole, centred)
    without, fewer = _fit_residual(np.hstack(others), centred) if others else (centred @ centred, 0)
    own, spare = rank - fewer, len(values) - 1 - rank
    noise = rest / spare
    if own == 0 or noise <= 1e-15:
        return ParameterEffect(name, objective, 0.0, Interval(0.0, 1.0), 1.0, ())
    ratio = max(0.0, (without - rest) / own / noise)
    tail = (1 - LEVEL) / 2
    ends = [_find_noncentrality(ratio, own, spare, level) for level in (1 - tail, tail)]
    estimate = max(0.0, own * (ratio * (spare - 2) / spare - 1))
    low, value, high = (x / (x + len(values)) for x in (ends[0], estimate, ends[1]))
    return ParameterEffect(
        name,
        objective,
        min(max(value, low), high),
        Interval(low, high),
        float(special.fdtrc(own, spare, ratio)),
        _estimate_changes(name, terms, whole, centred, noise, spare),
    )


def _fit_residual(columns: Floats, values: Floats) -> tuple[float, int]:
    """Return the sum of squares that a fit of the columns leaves, and their rank."""
    solution, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
    rest = values - columns @ solution
    return float(rest @ rest), int(rank)


def _find_noncentrality(ratio: float, own: int, spare: int, level: float) -> float:
    """Return the noncentrality at which an F up to `ratio` has the probability `level`."""
    if special.fdtr(own, spare, ratio) <= level:
        return 0.0

    def compute_excess(noncentrality: float) -> float:
        return float(special.ncfdtr(own, spare, noncentrality, ratio)) - level

    # Not `special.ncfdtrinc`, which never returns more than 10,000.
    high = own * ratio + 1.0
    while compute_excess(high) > 0:
        high *= 2
    root: Any = optimize.brentq(compute_excess, 0.0, high, xtol=1e-6 * high)
    return float(root)


def _estimate_changes(
    name: str, terms: dict[str, _Term], whole: Floats, values: Floats, noise: float, spare: int
) -> tuple[Change, ...]:
    squares = whole.T @ whole
    inverse = np.linalg.pinv(squares, hermitian=True)
    solution = inverse @ whole.T @ values
    reach = float(special.stdtrit(spare, 1 - (1 - LEVEL) / 2))
    changes: list[Change] = []
    for before, after, contrast in terms[name].contrasts:
        parts = [contrast if n == name else np.zeros(t.columns.shape[1]) for n, t in terms.items()]
        row = np.concatenate(parts)
        if not np.allclose(row @ inverse @ squares, row, atol=1e-6):
            continue
        difference = float(row @ solution)
        error = reach * math.sqrt(noise * float(row @ inverse @ row))
        span = Interval(difference - error, difference + error)
        changes.append(Change(before, after, difference, span))
    return tuple(changes)
