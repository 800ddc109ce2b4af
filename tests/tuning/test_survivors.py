"""The choice of what trains on after the wide rung, from known values there."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Cost, Estimate, Objective, Params, Rung, TrialRecord
from gdpo_tune.spec import first_trials
from gdpo_tune.tuning import survivors as module
from gdpo_tune.tuning.survivors import (
    Survivors,
    choose_survivors,
    find_corner,
    is_wide_rung_measured,
    list_levels,
)
from tests.support.tuning import load_halving_spec

Values = Callable[[Params], dict[str, float]]
STEP = 64
"""Completions of a step."""
PUBLISHED = 1
SPANNING = (2, 3, 4)
"""Trials of the wide rung at the reward weights that train long."""
BEGINNING = 0.3
"""Value of each objective of the untrained policy."""


def test_mixtures_of_two_points_lie_on_the_line_between_them():
    """Of the two alone, none has an area; a quarter, a half and three quarters have .25 x 1.5."""
    goals = [Objective(name, "maximize", 0.0) for name in "ab"]
    assert module._measure([np.array([1.0, 0.0]), np.array([0.0, 1.0])], goals) == 0.25 * 1.5


def mix(params, better="", bonus=0.03):
    """Give objectives that trade off, linear in the regression's features, and a better choice."""
    format, length = (
        math.log(float(params[f"reward_weights.{name}"]) / 0.05) / math.log(2 / 0.05)
        for name in ("format", "length")
    )
    shares = {"correctness": 1 - (format + length) / 2, "format": format, "length": length}
    more = bonus if better in (params["normalization"], params["group_size"]) else 0.0
    return {name: BEGINNING + more + 0.1 * share for name, share in shares.items()}


def measure_wide(spec, values=mix):
    """Return the records of a whole wide rung, all of which wait."""
    published = load_task_info(spec.task, spec.space.domains).published
    drawn = [
        first_trials.draw_startup_point(spec, index)
        for index in range(first_trials.count_wide(spec))
    ]
    points = [spec.space.complete_baseline(published), *map(spec.space.complete, drawn)]
    validation = dict.fromkeys(spec.objectives, Estimate(BEGINNING, 0.01))
    records = [TrialRecord(0, "untrained", "complete", {}, 0, "baseline", validation=validation)]
    for number, params in enumerate(points, PUBLISHED):
        role, proposer = ("published", "baseline") if number == 1 else ("search", "startup")
        record = TrialRecord(number, role, "paused", params, 0, proposer)
        rung = build_rung(first_trials.find_wide_step(spec), values(params))
        records.append(grow(record, rung, paused_at=rung.completions))
    return records


def grow(record, rung, **changes):
    """Return a record with one rung more."""
    return replace(record, rungs=(*record.rungs, rung), cost=rung.cost, **changes)


@pytest.fixture
def spec(tmp_path):
    return load_halving_spec(tmp_path)


def prefer(better):
    return lambda params: mix(params, better)


def build_rung(step, values):
    estimates = {name: Estimate(value, 0.01) for name, value in values.items()}
    return Rung(step, estimates, Cost(completions=STEP * step))


def list_chosen(survivors, records):
    return [*(records[number].params for number in survivors.numbers), *survivors.begun]


def is_at(params, weights):
    return all(params[name] == value for name, value in weights.items())


CHOICES = {"normalization": ("gdpo", "grpo", "grpo_no_std"), "group_size": (4, 8)}


@pytest.mark.parametrize(
    ("name", "better"), [(name, choice) for name, choices in CHOICES.items() for choice in choices]
)
def test_the_points_that_span_the_front_have_the_choices_that_the_rung_favours(spec, name, better):
    records = measure_wide(spec, prefer(better))
    chosen = list_chosen(choose_survivors(spec, records), records)
    for weights in first_trials.list_long_weights(spec):
        assert any(is_at(each, weights) and each[name] == better for each in chosen)
    assert records[PUBLISHED].params in chosen


def test_such_a_point_goes_on_unless_others_are_clearly_better(spec, monkeypatch):
    for better, goes_on in (("gdpo", True), ("grpo", False)):
        records = measure_wide(spec, prefer(better))
        survivors = choose_survivors(spec, records)
        assert survivors.numbers.issuperset(SPANNING) == goes_on
        assert len(survivors.begun) == (0 if goes_on else len(SPANNING))
    monkeypatch.setattr(module, "CLEARLY_MORE", 100.0)
    assert choose_survivors(spec, records).numbers.issuperset(SPANNING)


def test_without_merges_none_begins_anew(tmp_path):
    spec = load_halving_spec(tmp_path, 1400, "search.merges.budget=0")
    survivors = choose_survivors(spec, measure_wide(spec, prefer("grpo")))
    assert not survivors.begun
    assert len(survivors.numbers) == 4


@pytest.mark.parametrize("better", ["", "grpo"])
@pytest.mark.parametrize("steps", [420, 1000, 1400, 20_000])
def test_all_grow_to_the_length_that_the_budget_pays_for(tmp_path, steps, better):
    spec = load_halving_spec(tmp_path, steps)
    records = measure_wide(spec, prefer(better))
    survivors, first = choose_survivors(spec, records), first_trials.find_wide_step(spec)
    going, begun = len(survivors.numbers), len(survivors.begun)
    assert going + begun == 4
    needed = (len(records) - 1) * first + going * (survivors.end - first) + begun * survivors.end
    assert needed <= steps < needed + going + begun or survivors.end == spec.training.steps


def test_more_go_on_where_the_budget_pays_for_more_than_the_longest(tmp_path):
    found = []
    for steps in (600, 900, 1200, 5000):
        spec = load_halving_spec(tmp_path, steps, "training.steps=100")
        survivors = choose_survivors(spec, measure_wide(spec))
        assert len(survivors.numbers) + len(survivors.begun) >= 4
        found.append((len(survivors.numbers), survivors.end))
    numbers, ends = zip(*found, strict=True)
    assert list(numbers) == sorted(numbers)
    assert numbers[0] <= 4
    assert numbers[-1] == 13, "all that were measured, in the end"
    assert ends[2:] == (100, 100)


@pytest.mark.parametrize("more", [1, 11, 196, 974])
def test_levels_halve_from_the_end_down_to_the_wide_rung(spec, more):
    first = first_trials.find_wide_step(spec)
    levels = list_levels(spec, [], first + more)
    assert (levels[0], levels[-1]) == (first, first + more)
    assert all(low < high <= low * 2 * 2**0.5 for low, high in pairwise(levels))


def test_what_happens_later_leaves_the_choice_as_it_is(spec):
    records = measure_wide(spec, prefer("grpo"))
    expected = choose_survivors(spec, records)
    for number in expected.numbers:
        longer = build_rung(expected.end, mix(records[number].params, "", 0.5))
        records[number] = grow(records[number], longer)
    for number in {record.number for record in records[2:]} - expected.numbers:
        records[number] = replace(records[number], state="pruned")
    assert choose_survivors(spec, records) == expected
    for params in expected.begun:
        assert find_corner(expected, records) == params
        corner = TrialRecord(len(records), "search", "paused", params, 0, "corner")
        records.append(
            grow(corner, build_rung(first_trials.find_wide_step(spec), mix(params, "", -0.2)))
        )
        assert choose_survivors(spec, records) == expected
    assert find_corner(expected, records) is None
    records.append(TrialRecord(len(records), "search", "running", records[3].params, 0, "model"))
    assert choose_survivors(spec, records) == expected
    assert is_wide_rung_measured(spec, records)


def test_an_extended_budget_keeps_the_length_of_those_that_have_ended(tmp_path, spec):
    records = measure_wide(spec)
    expected = choose_survivors(spec, records)
    for number in expected.numbers:
        longer = build_rung(expected.end, mix(records[number].params))
        ended = {"state": "complete", "ends_at": expected.end}
        records[number] = grow(records[number], longer, **ended)
    assert choose_survivors(load_halving_spec(tmp_path, 2800), records) == expected


@pytest.mark.parametrize(("bound", "is_chosen"), [(">= 0.0", True), (">= 0.4", False)])
def test_what_breaks_a_constraint_is_no_gain(tmp_path, bound, is_chosen):
    changes = (f"constraints.correctness='{bound}'", "training.steps=225")  # five train on
    spec = load_halving_spec(tmp_path, 1400, *changes)
    odd = spec.space.complete(first_trials.draw_startup_point(spec, 8))

    def trade(params):
        return mix(params) | ({"correctness": 0.25, "format": 0.7} if params == odd else {})

    records = measure_wide(spec, trade)
    (number,) = [record.number for record in records if record.params == odd]
    assert (number in choose_survivors(spec, records).numbers) == is_chosen


@pytest.mark.parametrize("number", [PUBLISHED, 4])
def test_the_wide_rung_is_over_once_all_were_measured_or_have_ended(spec, number):
    records = measure_wide(spec)
    assert is_wide_rung_measured(spec, records)
    assert not is_wide_rung_measured(spec, records[:-1])
    for state, is_over in (("running", False), ("failed", True)):
        records[number] = replace(records[number], state=state, rungs=())
        assert is_wide_rung_measured(spec, records) == is_over


def test_a_training_without_a_rung_is_not_chosen(spec):
    records = [
        replace(r, state="failed", rungs=()) if r.number in (1, 4) else r
        for r in measure_wide(spec)
    ]
    survivors = choose_survivors(spec, records)
    assert survivors.numbers.isdisjoint({1, 4})
    assert len(survivors.numbers) + len(survivors.begun) == 4
    chosen = list_chosen(survivors, records)
    for weights in first_trials.list_long_weights(spec):
        assert any(is_at(params, weights) for params in chosen), "a point that failed begins anew"


def test_without_any_rung_nothing_goes_on(spec):
    records = [replace(r, state="failed", rungs=()) for r in measure_wide(spec)]
    assert choose_survivors(spec, records) == Survivors(frozenset(), (), spec.training.steps)
