"""Choice of what trains on after the wide rung of a divided budget.

At the wide rung many configurations have trained equally long. Values there tell which settings
serve (mode, group size, learning rate), but not which reward weights span the front at the end:
policies lie close together by then. So two kinds of trainings go on beside the published setting:

1. Each corner of the reward weights, with the settings that the rung favours for it. A regression
   of every objective on all dimensions predicts the values of each corner under the settings of
   each configuration. Corner by corner, the one is taken that adds most hypervolume to the front of
   linear mixtures with those taken before: a mixture is about what a merge of two policies reaches.
   A corner that began in the wide rung goes on from there, unless another one gains clearly more.
2. The configurations whose own values add most to that front.

All grow to the same length, which the budget divided by their number pays for. The choice depends
on the spec and the rungs alone: every process makes the same.

Shapes: N configurations of the wide rung, D features of a configuration, M objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from gdpo_tune.analysis.pareto import Floats, compute_hypervolume
from gdpo_tune.core.trials import Objective, Params, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.first_trials import (
    WEIGHTS,
    count_wide,
    divide_budget,
    find_wide_step,
    list_corners,
)
from gdpo_tune.spec.space import Choices, Uniform
from gdpo_tune.tuning.schedulers import read_values, tighten_references

RIDGE = 1.0
"""Penalty of the regression, in configurations that have no effect at all."""
OWN_SHARE = 0.5
"""Weight of a configuration's own value beside the one that the regression predicts for it."""
CLEARLY_MORE = 0.02
"""Share of the hypervolume that a corner begun anew has to add beyond one that goes on."""
MIXED = (0.25, 0.5, 0.75)
"""Shares of the first of two policies in the mixtures that stand for their merges."""


@dataclass(frozen=True)
class Survivors:
    """Trainings that go on after the wide rung."""

    numbers: frozenset[int]
    """Trials that go on from the rung, the published setting included."""
    begun: tuple[Params, ...]
    """Complete parameters of the corners that begin anew."""
    end: int
    """Steps at which they end, if all get there."""


def list_wide(spec: SweepSpec, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the configurations of the wide rung that have begun, without the published setting."""
    wide = [
        record
        for record in records
        if record.role == "search"
        and record.proposer != "corner"
        and not record.request
        and record.is_comparable
    ]
    return wide[: count_wide(spec, records)]


def is_wide_over(spec: SweepSpec, records: Sequence[TrialRecord]) -> bool:
    """Return whether all configurations of the wide rung were measured there, or have ended."""
    wide = list_wide(spec, records)
    growing = [*wide, *(r for r in records if r.role == "published" and r.is_comparable)]
    waits = any(record.state == "running" and not record.rungs for record in growing)
    return not waits and len(wide) >= count_wide(spec, records)


def find_corner(survivors: Survivors, records: Sequence[TrialRecord]) -> Params | None:
    """Return the first corner to begin anew that no trial has; None if all have begun."""
    begun = [r.params for r in records if r.proposer == "corner" and r.is_comparable]
    return next((params for params in survivors.begun if params not in begun), None)


def choose_survivors(spec: SweepSpec, records: Sequence[TrialRecord]) -> Survivors:
    """Choose what trains on, from the values of the wide rung among the records."""
    published = [r for r in records if r.role == "published" and r.is_comparable and r.rungs]
    rows = [*published, *(r for r in list_wide(spec, records) if r.rungs)]
    if not rows:
        return Survivors(frozenset(), (), spec.training.steps)
    corners = list_corners(spec)
    goals = tighten_references(spec)
    observed = np.array([read_values(spec, record.rungs[0])[0] for record in rows])
    predict = _fit([encode_params(spec, record.params) for record in rows], observed)
    smoothed = {
        record.number: (1 - OWN_SHARE) * predict(encode_params(spec, record.params))
        + OWN_SHARE * own
        for record, own in zip(rows, observed, strict=True)
    }
    numbers, begun = [record.number for record in published], list[Params]()
    points = [smoothed[number] for number in numbers]
    for corner in corners:
        present = [r for r in rows if all(r.params.get(n) == v for n, v in corner.items())]
        known = {_freeze(record.params) for record in rows} | {_freeze(p) for p in begun}
        fresh = [
            params
            for record in rows
            if _freeze(params := _move(spec, record.params, corner)) not in known
        ]
        going = [(smoothed[r.number], r) for r in present if r.number not in numbers]
        anew = [(predict(encode_params(spec, params)), params) for params in fresh]
        best = max(going, key=lambda pair: _gain(points, pair[0], goals), default=None)
        other = max(anew, key=lambda pair: _gain(points, pair[0], goals), default=None)
        margin = CLEARLY_MORE * _measure(points, goals)
        if best and (
            not other or _gain(points, other[0], goals) <= _gain(points, best[0], goals) + margin
        ):
            numbers.append(best[1].number)
            points.append(best[0])
        elif other:
            begun.append(other[1])
            points.append(other[0])
    count, end = divide_budget(spec, len(rows), len(begun), records)
    while len(numbers) + len(begun) < count and len(numbers) < len(rows):
        rest = [record.number for record in rows if record.number not in numbers]
        chosen = max(rest, key=lambda number: (_gain(points, smoothed[number], goals), -number))
        numbers.append(chosen)
        points.append(smoothed[chosen])
    return Survivors(frozenset(numbers), tuple(begun), end)


def list_levels(spec: SweepSpec, records: Sequence[TrialRecord], end: int) -> tuple[int, ...]:
    """Return the steps at which trainings wait, from the wide rung to `end`, halved in between."""
    first, levels = find_wide_step(spec, records), [end]
    while levels[0] / 2 > first * math.sqrt(2):
        levels.insert(0, math.ceil(levels[0] / 2))
    return (first, *(level for level in levels if level > first))


def encode_params(spec: SweepSpec, params: Params) -> Floats:
    """Return the features of a configuration, `float[D]`, each from 0 to 1.

    A choice has one for each of its values, a range its place on its own scale. One without an
    effect is in the middle.
    """
    active, features = spec.space.select_active(params), list[float]()
    for name, domain in spec.space.searched_domains.items():
        value = params[name]
        if isinstance(domain, Choices):
            share = 1 / len(domain.choices)
            chosen = [float(value == choice) for choice in domain.choices]
            features += chosen if name in active else [share] * len(domain.choices)
        else:
            features.append(_find_place(domain, float(value)) if name in active else 0.5)
    return np.array(features)


def _find_place(domain: Uniform, value: float) -> float:
    low, high = float(domain.low), float(domain.high)
    if domain.log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _fit(features: Sequence[Floats], values: Floats) -> Callable[[Floats], Floats]:
    """Return the ridge regression of values `[N, M]` on features, as a function of features."""
    x = np.array(features)
    mean, centre = x.mean(axis=0), values.mean(axis=0)
    x = x - mean
    slopes = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (values - centre))

    def predict(point: Floats) -> Floats:
        return centre + (point - mean) @ slopes

    return predict


def _move(spec: SweepSpec, params: Params, corner: Params) -> Params:
    """Return the settings of a configuration at a corner of the reward weights."""
    searched = spec.space.searched_domains
    settings = {n: v for n, v in params.items() if n in searched and not n.startswith(WEIGHTS)}
    settings = {n: v for n, v in settings.items() if searched[n].contains(v)}
    return spec.space.complete_baseline({**settings, **corner})


def _freeze(params: Params) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(params.items()))


def _measure(points: Sequence[Floats], goals: Sequence[Objective]) -> float:
    """Return the hypervolume of points and of the mixtures of each two of them."""
    mixtures = [t * a + (1 - t) * b for a, b in combinations(points, 2) for t in MIXED]
    return compute_hypervolume([*points, *mixtures], goals) if points else 0.0


def _gain(points: Sequence[Floats], point: Floats, goals: Sequence[Objective]) -> float:
    return _measure([*points, point], goals) - _measure(points, goals)
