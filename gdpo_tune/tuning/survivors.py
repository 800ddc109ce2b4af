"""Choice of what trains on after the wide rung of a divided budget.

At the wide rung many configurations have trained equally long. Values there tell which choices
serve (mode, group size, ...), but not which reward weights span the front at the end: policies lie
close together by then. So three kinds of trainings go on:

1. The published setting.
2. The points that span what can be traded, which began in the wide rung, with the choices that the
   rung favours. A regression of every objective on all dimensions predicts the values of such a
   point under the choices of each configuration. Point by point, those are taken that add most
   hypervolume to the front of linear mixtures with what was taken before: a mixture is about what a
   merge of two policies reaches. If others gain clearly more than those it has, it begins anew.
   It keeps its learning rate, whose effect at a rung is mostly how far a policy has moved, unless
   it is worse than the initial policy in every objective by then.
3. The configurations whose own values add most to that front.

Values at the rung are extrapolated to the end: the change since the initial policy is multiplied by
`sqrt(end / first)`, within the range of the metric. Else a configuration that has hardly moved
would look as good as one that trades much.

All grow to the same length, which the budget divided by their number pays for. The choice depends
on the spec and the rungs alone: every process makes the same.

Shapes: N configurations of the wide rung, D features of a configuration, M objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter

import numpy as np

from gdpo_tune.analysis.pareto import Floats, compute_hypervolume, compute_losses
from gdpo_tune.core import registry
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Objective, Params, ParamValue, Rung, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.first_trials import (
    WEIGHTS,
    count_wide,
    divide_budget,
    find_wide_rung,
    find_wide_step,
    list_long_weights,
)
from gdpo_tune.spec.space import Choices, Uniform
from gdpo_tune.tuning.schedulers import read_values, tighten_references

RIDGE = 1.0
"""Penalty of the regression, in configurations that have no effect at all."""
OWN_SHARE = 0.5
"""Weight of a configuration's own value beside the one that the regression predicts for it."""
CLEARLY_MORE = 0.02
"""Share of the hypervolume that a point begun anew has to add beyond the one that goes on."""
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


def list_wide_rung_trials(spec: SweepSpec, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the configurations of the wide rung that have begun, without the published setting."""
    wide = [
        record
        for record in records
        if record.role == "search" and record.proposer != "corner" and not record.request
    ]
    return wide[: count_wide(spec, records)]


def is_wide_rung_measured(spec: SweepSpec, records: Sequence[TrialRecord]) -> bool:
    """Return whether all configurations of the wide rung were measured there, or have ended."""
    wide = list_wide_rung_trials(spec, records)
    growing = [*wide, *(r for r in records if r.role == "published")]
    waits = any(r.state == "running" and not find_wide_rung(spec, records, r) for r in growing)
    return not waits and len(wide) >= count_wide(spec, records)


def find_corner(survivors: Survivors, records: Sequence[TrialRecord]) -> Params | None:
    """Return the first corner to begin anew that no trial has; None if all have begun."""
    begun = [r.params for r in records if r.proposer == "corner"]
    return next((params for params in survivors.begun if params not in begun), None)


def choose_survivors(spec: SweepSpec, records: Sequence[TrialRecord]) -> Survivors:
    """Choose what trains on, from the values of the wide rung among the records."""
    published = [r for r in records if r.role == "published"]
    rungs = {
        record.number: rung
        for record in (*published, *list_wide_rung_trials(spec, records))
        if (rung := find_wide_rung(spec, records, record))
    }
    published = [record for record in published if record.number in rungs]
    rows = [*published, *(r for r in list_wide_rung_trials(spec, records) if r.number in rungs)]
    if not rows:
        return Survivors(frozenset(), (), spec.training.steps)
    goals = tighten_references(spec)
    observed, origin = _extrapolate(spec, records, list(rungs.values()))
    predict = _fit([encode_params(spec, record.params) for record in rows], observed)
    predicted = {r.number: predict(encode_params(spec, r.params)) for r in rows}
    smoothed = {
        record.number: (1 - OWN_SHARE) * predicted[record.number] + OWN_SHARE * own
        for record, own in zip(rows, observed, strict=True)
    }
    numbers, begun = [record.number for record in published], list[Params]()
    points = [smoothed[number] for number in numbers]
    for weights in list_long_weights(spec):
        present = [r for r in rows if all(r.params.get(n) == v for n, v in weights.items())]
        present = [r for r in present if r.number not in numbers]
        gains = _compute_gains(points, [predicted[r.number] for r in present], goals)
        gain, going = max(zip(gains, present, strict=True), key=itemgetter(0), default=(0.0, None))
        kept = going.params if going and not _is_worse(spec, rungs[going.number], origin) else {}
        anew = [_move(spec, r.params, weights, kept) for r in rows]
        values = [predict(encode_params(spec, params)) for params in anew]
        gains = _compute_gains(points, values, goals)
        best = max(range(len(anew)), key=gains.__getitem__)
        margin = CLEARLY_MORE * _measure(points, goals) + gain
        if going is not None and gains[best] <= margin:
            numbers.append(going.number)
            points.append(smoothed[going.number])
        elif anew[best] not in begun:
            begun.append(anew[best])
            points.append(values[best])
    count, end = divide_budget(spec, len(rows), len(begun), records)
    while len(numbers) + len(begun) < count and len(numbers) < len(rows):
        rest = [record.number for record in rows if record.number not in numbers]
        gains = _compute_gains(points, [smoothed[number] for number in rest], goals)
        _, chosen = max(zip(gains, rest, strict=True), key=lambda pair: (pair[0], -pair[1]))
        numbers.append(chosen)
        points.append(smoothed[chosen])
    return Survivors(frozenset(numbers), tuple(begun), end)


def _extrapolate(
    spec: SweepSpec, records: Sequence[TrialRecord], rungs: Sequence[Rung]
) -> tuple[Floats, Floats]:
    """Return where the values of the wide rung lead, `float[N, M]`, and where they began `[M]`.

    They stay within the range of each metric; the beginning is NaN while it is unknown.
    """
    observed = np.array([read_values(spec, rung)[0] for rung in rungs])
    role = "start" if spec.start is not None else "untrained"
    begin = [r.validation for r in records if r.role == role and r.state == "complete"]
    if not begin:
        return observed, np.full(observed.shape[1], np.nan)
    metrics = registry.collect_metrics(load_task_info(spec.task, spec.space.domains))
    origin = np.array([begin[-1][name].mean for name in spec.objectives])
    _, end = divide_budget(spec, len(rungs))
    moved = origin + math.sqrt(end / find_wide_step(spec, records)) * (observed - origin)
    bounds = [(metrics[name].low, metrics[name].high) for name in spec.objectives]
    low, high = np.array(bounds).T
    return np.clip(moved, low, high), origin


def _is_worse(spec: SweepSpec, rung: Rung, origin: Floats) -> bool:
    """Return whether a policy at the wide rung is worse than the initial one in every objective."""
    goals = spec.list_objectives()
    values = [read_values(spec, rung)[0], tuple(origin)]
    own, other = compute_losses(values, goals)
    return bool((own > other).all())


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
            features.append(domain.find_place(float(value)) if name in active else 0.5)
    return np.array(features)


def _fit(features: Sequence[Floats], values: Floats) -> Callable[[Floats], Floats]:
    """Return the ridge regression of values `[N, M]` on features, as a function of features."""
    x = np.array(features)
    mean, centre = x.mean(axis=0), values.mean(axis=0)
    x = x - mean
    slopes = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (values - centre))

    def predict(point: Floats) -> Floats:
        return centre + (point - mean) @ slopes

    return predict


def _move(spec: SweepSpec, params: Params, weights: Params, kept: Params) -> Params:
    """Return the settings of a configuration at other weights, with the ranges that are `kept`."""
    settings: dict[str, ParamValue] = {}
    for name, domain in spec.space.searched_domains.items():
        source = kept if isinstance(domain, Uniform) and name in kept else params
        if not name.startswith(WEIGHTS) and domain.contains(source[name]):
            settings[name] = source[name]
    return spec.space.complete_baseline({**settings, **weights})


def _measure(points: Sequence[Floats], goals: Sequence[Objective]) -> float:
    """Return the hypervolume of points and of the mixtures of each two of them."""
    mixtures = [t * a + (1 - t) * b for a, b in combinations(points, 2) for t in MIXED]
    return compute_hypervolume([*points, *mixtures], goals) if points else 0.0


def _compute_gains(
    points: Sequence[Floats], more: Sequence[Floats], goals: Sequence[Objective]
) -> list[float]:
    """Return what each of `more` alone would add to the hypervolume."""
    base = _measure(points, goals)
    return [_measure([*points, point], goals) - base for point in more]
