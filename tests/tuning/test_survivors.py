"""The choice of what trains on after the wide rung, from known values there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trials import Cost, Estimate, Params, Rung, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.first_trials import (
    count_wide,
    draw_startup_point,
    find_wide_step,
    list_long_weights,
)
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


def mix(params: Params, better: object = "", bonus: float = 0.03) -> dict[str, float]:
    """Give objectives that trade off, linear in the regression's features, and a better choice."""
    format, length = (
        math.log(float(params[f"reward_weights.{name}"]) / 0.05) / math.log(2 / 0.05)
        for name in ("format", "length")
    )
    shares = {"correctness": 1 - (format + length) / 2, "format": format, "length": length}
    more = bonus if better in (params["normalization"], params["group_size"]) else 0.0
    return {name: BEGINNING + more + 0.1 * share for name, share in shares.items()}


def measure_wide(spec: SweepSpec, values: Values = mix) -> list[TrialRecord]:
    """Return the records of a whole wide rung, all of which wait."""
    published = load_task_info(spec.task, spec.space.domains).published
    drawn = [draw_startup_point(spec, index) for index in range(count_wide(spec))]
    points = [spec.space.complete_baseline(published), *map(spec.space.complete, drawn)]
    validation = dict.fromkeys(spec.objectives, Estimate(BEGINNING, 0.01))
    records = [TrialRecord(0, "untrained", "complete", {}, 0, "baseline", validation=validation)]
    for number, params in enumerate(points, PUBLISHED):
        rung = build_rung(find_wide_step(spec), values(params))
        role, proposer = ("published", "baseline") if number == 1 else ("search", "startup")
        records.append(
            TrialRecord(
                number,
                role,
                "paused",
                params,
                0,
                proposer,
                rungs=(rung,),
                cost=rung.cost,
                paused_at=rung.completions,
            )
        )
    return records


def build_rung(step: int, values: dict[str, float]) -> Rung:
    estimates = {name: Estimate(value, 0.01) for name, value in values.items()}
    return Rung(step, estimates, Cost(completions=STEP * step))


def list_chosen(survivors: Survivors, records: Sequence[TrialRecord]) -> list[Params]:
    return [*(records[number].params for number in survivors.numbers), *survivors.begun]


def is_at(params: Params, weights: Params) -> bool:
    return all(params[name] == value for name, value in weights.items())


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *(("normalization", mode) for mode in ("gdpo", "grpo", "grpo_no_std")),
        *(("group_size", size) for size in (4, 8)),
    ],
)
def test_the_points_that_span_the_front_have_the_choices_that_the_rung_favours(
    tmp_path: Path, name: str, better: str | int
):
    spec = load_halving_spec(tmp_path)
    records = measure_wide(spec, lambda params: mix(params, better))
    chosen = list_chosen(choose_survivors(spec, records), records)
    for weights in list_long_weights(spec):
        assert any(is_at(each, weights) and each[name] == better for each in chosen)
    assert records[PUBLISHED].params in chosen


def test_such_a_point_goes_on_unless_others_are_clearly_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = load_halving_spec(tmp_path)
    for better, goes_on in (("gdpo", True), ("grpo", False)):
        records = measure_wide(spec, lambda params, better=better: mix(params, better))
        survivors = choose_survivors(spec, records)
        assert survivors.numbers.issuperset(SPANNING) == goes_on
        assert len(survivors.begun) == (0 if goes_on else len(SPANNING))
    monkeypatch.setattr(module, "CLEARLY_MORE", 100.0)
    assert choose_survivors(spec, records).numbers.issuperset(SPANNING)


def test_without_merges_none_begins_anew(tmp_path: Path):
    spec = load_halving_spec(tmp_path, 1400, "search.merges.budget=0")
    survivors = choose_survivors(spec, measure_wide(spec, lambda params: mix(params, "grpo")))
    assert not survivors.begun
    assert len(survivors.numbers) == 4


@pytest.mark.parametrize("better", ["", "grpo"])
@pytest.mark.parametrize("steps", [420, 1000, 1400, 20_000])
def test_all_grow_to_the_length_that_the_budget_pays_for(tmp_path: Path, steps: int, better: str):
    spec = load_halving_spec(tmp_path, steps)
    records = measure_wide(spec, lambda params: mix(params, better))
    survivors, first = choose_survivors(spec, records), find_wide_step(spec)
    going, begun = len(survivors.numbers), len(survivors.begun)
    assert going + begun == 4
    needed = (len(records) - 1) * first + going * (survivors.end - first) + begun * survivors.end
    assert needed <= steps < needed + going + begun or survivors.end == spec.training.steps


def test_more_go_on_where_the_budget_pays_for_more_than_the_longest(tmp_path: Path):
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


def test_levels_halve_from_the_end_down_to_the_wide_rung(tmp_path: Path):
    spec = load_halving_spec(tmp_path)
    first = find_wide_step(spec)
    for end in (first + 1, 37, 222, 1000):
        levels = list_levels(spec, [], end)
        assert (levels[0], levels[-1]) == (first, end)
        assert all(low < high for low, high in pairwise(levels))
        assert all(high / low <= 2 * 2**0.5 for low, high in pairwise(levels))


def test_what_happens_later_leaves_the_choice_as_it_is(tmp_path: Path):
    spec = load_halving_spec(tmp_path)
    records = measure_wide(spec, lambda params: mix(params, "grpo"))
    expected = choose_survivors(spec, records)
    for number in expected.numbers:  # these grew
        longer = build_rung(expected.end, mix(records[number].params, "", 0.5))
        rungs = (*records[number].rungs, longer)
        records[number] = replace(records[number], rungs=rungs, cost=longer.cost)
    stopped = {record.number for record in records[2:]} - expected.numbers
    for number in stopped:
        records[number] = replace(records[number], state="pruned")
    assert choose_survivors(spec, records) == expected
    for params in expected.begun:
        assert find_corner(expected, records) == params
        rung = build_rung(find_wide_step(spec), mix(params, "", -0.2))
        corner = TrialRecord(
            len(records), "search", "paused", params, 0, "corner", rungs=(rung,), cost=rung.cost
        )
        records.append(corner)
        assert choose_survivors(spec, records) == expected
    assert find_corner(expected, records) is None
    further = TrialRecord(len(records), "search", "running", records[3].params, 0, "model")
    assert choose_survivors(spec, [*records, further]) == expected
    assert is_wide_rung_measured(spec, [*records, further])


def test_an_extended_budget_keeps_the_length_of_those_that_have_ended(tmp_path: Path):
    records = measure_wide(load_halving_spec(tmp_path))
    expected = choose_survivors(load_halving_spec(tmp_path), records)
    for number in expected.numbers:
        longer = build_rung(expected.end, mix(records[number].params))
        rungs = (*records[number].rungs, longer)
        ended = {"state": "complete", "ends_at": expected.end, "cost": longer.cost}
        records[number] = replace(records[number], rungs=rungs, **ended)
    assert choose_survivors(load_halving_spec(tmp_path, 2800), records) == expected


@pytest.mark.parametrize(("bound", "is_chosen"), [(">= 0.0", True), (">= 0.4", False)])
def test_what_breaks_a_constraint_is_no_gain(tmp_path: Path, bound: str, is_chosen: bool):
    changes = (f"constraints.correctness='{bound}'", "training.steps=225")  # five train on
    spec = load_halving_spec(tmp_path, 1400, *changes)
    odd = spec.space.complete(draw_startup_point(spec, 8))

    def trade(params: Params) -> dict[str, float]:
        return mix(params) | ({"correctness": 0.25, "format": 0.7} if params == odd else {})

    records = measure_wide(spec, trade)
    (number,) = [record.number for record in records if record.params == odd]
    assert (number in choose_survivors(spec, records).numbers) == is_chosen


def test_the_wide_rung_is_over_once_all_were_measured_or_have_ended(tmp_path: Path):
    spec = load_halving_spec(tmp_path)
    records = measure_wide(spec)
    assert is_wide_rung_measured(spec, records)
    assert not is_wide_rung_measured(spec, records[:-1])
    for number in (PUBLISHED, 4):
        running = replace(records[number], state="running", rungs=())
        assert not is_wide_rung_measured(
            spec, [r if r.number != number else running for r in records]
        )
        failed = replace(running, state="failed")
        assert is_wide_rung_measured(spec, [r if r.number != number else failed for r in records])


def test_a_training_without_a_rung_is_not_chosen(tmp_path: Path):
    spec = load_halving_spec(tmp_path)
    records = measure_wide(spec)
    failed = [replace(r, state="failed", rungs=()) if r.number in (1, 4) else r for r in records]
    survivors = choose_survivors(spec, failed)
    assert survivors.numbers.isdisjoint({1, 4})
    assert len(survivors.numbers) + len(survivors.begun) == 4
    chosen = list_chosen(survivors, failed)
    for weights in list_long_weights(spec):
        assert any(is_at(params, weights) for params in chosen), "a point that failed begins anew"


def test_without_any_rung_nothing_goes_on(tmp_path: Path):
    spec = load_halving_spec(tmp_path)
    records = [replace(r, state="failed", rungs=()) for r in measure_wide(spec)]
    assert choose_survivors(spec, records) == Survivors(frozenset(), (), spec.training.steps)
