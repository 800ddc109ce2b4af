"""What each searched parameter does to each objective, and what the data cannot tell.

For each objective a linear model of test means over the N trained configurations: of a parameter
with numbers its value and its square (on a log scale where it spans a factor of 5), of one with
names one term for each name. A parameter's importance is the share of variance that it explains
among what the others leave (partial eta squared), by the F test that compares the model with the
one without it; its interval is that of the test's noncentrality. So parameters that the search has
moved together are not counted for one another, and interactions are counted as noise.

Source: Smithson 2001, Correct confidence intervals for various regression effect sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from scipy import optimize, special

from gdpo_tune.analysis.pareto import Floats
from gdpo_tune.analysis.probability import LEVEL, Interval
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.resampling import holm
from gdpo_tune.core.trials import Objective, ParamValue

WIDE = 5.0
"""Ratio of the largest to the smallest value from which a parameter counts on a log scale."""
SPARE = 4
"""Configurations beyond the model's terms that are needed to tell noise from effects."""


@dataclass(frozen=True)
class Change:
    """What an objective does when one parameter moves and the others stay."""

    before: str
    """Value that it moves from: the smallest, or the first name."""
    after: str
    difference: float
    interval: Interval


@dataclass(frozen=True)
class ParameterEffect:
    """What one parameter does to one objective."""

    parameter: str
    objective: str
    importance: float
    """Share of the variance that the other parameters leave, 0 to 1."""
    interval: Interval
    p: float
    """Of no effect at all, corrected for all parameters and objectives of the sweep."""
    changes: tuple[Change, ...]
    """One for numbers, from the smallest to the largest; for names one against the first each. A
    change that always came with one of another parameter is left out: who made it is unknown."""


@dataclass(frozen=True)
class Effects:
    """Every parameter's effect on every objective."""

    found: tuple[ParameterEffect, ...]
    """Empty where there are too few configurations."""
    configurations: int
    needed: int
    """Configurations from which effects can be told from noise at all."""


@dataclass(frozen=True)
class _Term:
    """The columns of one parameter, and the contrasts that its changes are made of."""

    columns: Floats
    """`[N, k]`, centred."""
    contrasts: tuple[tuple[str, str, Floats], ...]
    """Before, after, and what each column changes by."""


def effects(
    configurations: Sequence[Configuration],
    dimensions: Sequence[str],
    objectives: Sequence[Objective],
) -> Effects:
    """Effects of the parameters `dimensions`; one that has one value alone is left out."""
    shown = [c for c in configurations if c.role != "untrained"]
    if not shown:
        return Effects((), 0, 1 + SPARE)
    terms = {name: _term([c.params.get(name) for c in shown]) for name in dimensions}
    terms = {name: term for name, term in terms.items() if term.columns.shape[1]}
    needed = 1 + sum(term.columns.shape[1] for term in terms.values()) + SPARE
    if len(shown) < needed or not terms:
        return Effects((), len(shown), needed)
    found = [
        _effect(name, goal.name, terms, np.array([c.mean[goal.name].mean for c in shown]))
        for goal in objectives
        for name in terms
    ]
    corrected = holm([effect.p for effect in found])
    return Effects(
        tuple(
            ParameterEffect(e.parameter, e.objective, e.importance, e.interval, p, e.changes)
            for e, p in zip(found, corrected, strict=True)
        ),
        len(shown),
        needed,
    )


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether values spread over a factor of `WIDE`, all above 0."""
    return min(values) > 0 and max(values) / min(values) >= WIDE


def _term(values: Sequence[ParamValue | None]) -> _Term:
    numbers = [value for value in values if _is_number(value)]
    if len(set(numbers)) > 2:
        return _numeric(values, numbers)
    # Numbers by their size, names by the alphabet.
    names = sorted({str(value) for value in values}, key=lambda name: (len(name), name))
    if len(numbers) < len(values):
        names.sort()
    columns = np.array([[float(str(v) == name) for name in names[1:]] for v in values])
    unit = np.eye(len(names) - 1)
    contrasts = tuple((names[0], name, unit[i]) for i, name in enumerate(names[1:]))
    return _Term(_centred(columns.reshape(len(values), -1)), contrasts)


def _numeric(values: Sequence[ParamValue | None], numbers: Sequence[float]) -> _Term:
    low, high = float(min(numbers)), float(max(numbers))
    log = is_logarithmic(numbers)

    def place(value: float) -> float:
        """-1 at the smallest, 1 at the largest."""
        a, b, v = (math.log(x) if log else x for x in (low, high, value))
        return 2 * (v - a) / (b - a) - 1

    # Where a parameter had no effect it has no value either: it stands in the middle.
    places = np.array([place(float(v)) if _is_number(v) else 0.0 for v in values])
    columns = np.column_stack([places, places**2])
    return _Term(_centred(columns), ((f"{low:.3g}", f"{high:.3g}", np.array([2.0, 0.0])),))


def _is_number(value: ParamValue | None) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _centred(columns: Floats) -> Floats:
    return columns - columns.mean(axis=0) if columns.size else columns


def _effect(name: str, objective: str, terms: dict[str, _Term], values: Floats) -> ParameterEffect:
    centred = values - values.mean()
    whole = np.hstack([term.columns for term in terms.values()])
    others = [term.columns for other, term in terms.items() if other != name]
    rest, rank = _residual(whole, centred)
    without, fewer = _residual(np.hstack(others), centred) if others else (centred @ centred, 0)
    own, spare = rank - fewer, len(values) - 1 - rank
    noise = rest / spare
    if own == 0 or noise <= 1e-15:
        return ParameterEffect(name, objective, 0.0, Interval(0.0, 1.0), 1.0, ())
    ratio = max(0.0, (without - rest) / own / noise)
    tail = (1 - LEVEL) / 2
    ends = [_noncentrality(ratio, own, spare, level) for level in (1 - tail, tail)]
    estimate = max(0.0, own * (ratio * (spare - 2) / spare - 1))
    low, value, high = (x / (x + len(values)) for x in (ends[0], estimate, ends[1]))
    return ParameterEffect(
        name,
        objective,
        min(max(value, low), high),
        Interval(low, high),
        float(special.fdtrc(own, spare, ratio)),
        _changes(name, terms, whole, centred, noise, spare),
    )


def _residual(columns: Floats, values: Floats) -> tuple[float, int]:
    """Sum of squares that the columns leave, and their rank."""
    solution, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
    rest = values - columns @ solution
    return float(rest @ rest), int(rank)


def _noncentrality(ratio: float, own: int, spare: int, level: float) -> float:
    """The noncentrality under which an F as small as `ratio` has the probability `level`."""
    if special.fdtr(own, spare, ratio) <= level:
        return 0.0
    # Not `special.ncfdtrinc`, which never answers more than 10,000.
    high = own * ratio + 1.0
    while special.ncfdtr(own, spare, high, ratio) > level:
        high *= 2
    found: Any = optimize.brentq(_exceeds, 0.0, high, (own, spare, level, ratio), xtol=1e-6 * high)
    return float(found)


def _exceeds(noncentrality: float, own: int, spare: int, level: float, ratio: float) -> float:
    """How much more probable than `level` an F as small as `ratio` is."""
    return float(special.ncfdtr(own, spare, noncentrality, ratio)) - level


def _changes(
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
