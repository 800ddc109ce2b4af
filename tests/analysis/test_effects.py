"""Effects of each dimension: against closed forms, against noise alone, and at the limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t, ttest_ind

from gdpo_tune.analysis.effects import MAX_MORE, Dimension, estimate_effects
from gdpo_tune.core.trials import Cost, Estimate, Rung
from tests.support.analysis import GOALS, build_checkpoint, build_merge, build_trial

MODE = Dimension("mode", ("gdpo", "grpo"))
WEIGHT = Dimension("weight", (), 0.1, 10.0, log=True)
SPACE = (MODE, WEIGHT)
ONE = GOALS[:1]


def measure(number, params, a, b=0.5, se=0.0, step=20, **fields):
    validation = {"a": Estimate(a, se), "b": Estimate(b, se)}
    rungs = (Rung(step, validation, Cost(64 * step)),)
    return build_trial(number, 0.0, 0.0, **{"params": params, "rungs": rungs, **fields})


def draw_sweep(worth, dimensions=SPACE, seed=0, count=24, noise=0.02, **fields):
    """Simulate trainings at random points; `worth` takes the parameters, numbers as -1 to 1."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(count):
        params, places = {}, {}
        for d in dimensions:
            if d.choices:
                params[d.name] = places[d.name] = str(rng.choice(d.choices))
            else:
                places[d.name] = place = rng.uniform(-1, 1)
                low, high = np.log([d.low, d.high]) if d.log else (d.low, d.high)
                value = low + (place + 1) / 2 * (high - low)
                params[d.name] = float(np.exp(value) if d.log else value)
        values = [0.5 + worth(places) + rng.normal(0, noise) for _ in GOALS]
        records.append(measure(number, params, *values, **fields))
    return records


def find(effects, dimension, objective="a"):
    key = (dimension, objective)
    return [c for c in effects.contrasts if (c.dimension, c.objective) == key]


def slope(places):
    return -0.1 * places["weight"] + 0.06 * (places["mode"] == "grpo")


def test_one_question_is_the_t_test():
    values = [0.3, 0.42, 0.35, 0.5, 0.55, 0.47]
    modes = ["gdpo"] * 3 + ["grpo"] * 3
    records = [
        measure(i, {"mode": m}, v) for i, (m, v) in enumerate(zip(modes, values, strict=True))
    ]
    (found,) = estimate_effects(records, ONE, [MODE]).contrasts
    expected = ttest_ind(values[3:], values[:3]).confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(values[3:]) - np.mean(values[:3]))
    assert found.interval == pytest.approx((expected.low, expected.high), rel=0.02)
    assert found.is_told_apart == (expected.low > 0)


def test_a_range_goes_from_its_low_to_its_high_end_on_its_own_scale():
    weights = [0.1, 1.0, 10.0, 0.1, 1.0, 10.0]
    records = [
        measure(i, {"weight": w}, 0.5 + 0.1 * math.log10(w) + 0.01 * (-1) ** (i // 3))
        for i, w in enumerate(weights)
    ]
    (found,) = estimate_effects(records, ONE, [WEIGHT]).contrasts
    assert (found.before, found.after) == ("0.1", "10")
    assert found.value == pytest.approx(0.2)
    deviation = 0.01 * math.sqrt(6 / 4)
    reach = t.ppf(0.975, 4) * deviation * 2 / math.sqrt(4)
    assert found.interval == pytest.approx((0.2 - reach, 0.2 + reach), rel=0.02)


def test_known_effects_lie_in_their_intervals():
    effects = estimate_effects(draw_sweep(slope), GOALS, SPACE)
    assert (effects.step, effects.completions, effects.trainings) == (20, 1280, 24)
    for objective in ("a", "b"):
        (mode,), (weight,) = find(effects, "mode", objective), find(effects, "weight", objective)
        assert mode.interval.low < 0.06 < mode.interval.high
        assert weight.interval.low < -0.2 < weight.interval.high < 0
        assert weight.is_told_apart
        assert weight.more == 0


@pytest.mark.slow
def test_noise_alone_is_told_apart_in_one_sweep_of_twenty():
    dimensions = (Dimension("kind", ("a", "b", "c")), *SPACE, Dimension("idle", (), 0.0, 1.0))
    wrong = sum(
        any(
            c.is_told_apart
            for c in estimate_effects(
                draw_sweep(lambda _: 0.0, dimensions, seed, 13), GOALS, dimensions
            ).contrasts
        )
        for seed in range(100)
    )
    assert wrong <= 9  # a rate of .05 has more in 2 % of such samples


def test_each_pair_of_choices_is_a_question_that_counts():
    kind = Dimension("kind", ("a", "b", "c"))
    records = draw_sweep(lambda p: 0.1 * (p["kind"] == "c"), (kind,))
    found = find(estimate_effects(records, GOALS, (kind,)), "kind")
    assert [(c.before, c.after) for c in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found[0].value + found[2].value == pytest.approx(found[1].value)
    two = [
        replace(r, params={**r.params, "mode": "gdpo" if i % 2 else "grpo"})
        for i, r in enumerate(records)
    ]
    more = find(estimate_effects(two, GOALS, (kind, MODE)), "kind")
    width, wider = (c[0].interval.high - c[0].interval.low for c in (found, more))
    assert wider > width


def test_a_parameter_counts_only_where_it_acts():
    """The threshold has a value in each training, and an effect under `grpo` alone."""
    dimensions = (*SPACE, Dimension("threshold", (), 0.0, 1.0, when={"mode": ("grpo",)}))
    records = draw_sweep(lambda p: 0.1 * p["threshold"] * (p["mode"] == "grpo"), dimensions)
    (found,) = find(estimate_effects(records, GOALS, dimensions), "threshold")
    assert found.interval.low < 0.2 < found.interval.high
    assert found.is_told_apart
    for record in records:
        if record.params["mode"] == "gdpo":
            del record.params["threshold"]
    assert find(estimate_effects(records, GOALS, dimensions), "threshold") == [found]


def test_the_step_is_the_one_at_which_most_configurations_were_measured():
    records = draw_sweep(slope, count=12)
    for index in range(4):
        late = Rung(60, {"a": Estimate(9.0, 0.0), "b": Estimate(9.0, 0.0)}, Cost(3840))
        records[index] = replace(records[index], rungs=(*records[index].rungs, late))
    effects = estimate_effects(records, GOALS, SPACE)
    assert (effects.step, effects.trainings) == (20, 12)
    whole = [replace(r, rungs=(*r.rungs, replace(r.rungs[0], step=60))) for r in records[4:]]
    assert estimate_effects([*records[:4], *whole], GOALS, SPACE).step == 60  # the later of equals


def test_only_trainings_in_the_space_count():
    records = draw_sweep(slope)
    expected = estimate_effects(records, GOALS, SPACE)
    rungs = records[0].rungs
    others = [
        build_trial(40, 0.9, 0.9, role="untrained", params={}, rungs=rungs),
        build_checkpoint(41, 0.9, 0.9, (3, 20), rungs=rungs),
        build_merge(42, 0.9, 0.9, (3, 60, 0.5), (4, 60, 0.5), rungs=rungs),
        measure(43, {"mode": "gdpo", "weight": 90.0}, 0.9, role="published"),
        measure(44, {"mode": "other", "weight": 1.0}, 0.9),
        build_trial(46, 0.9, 0.9, params={"mode": "gdpo", "weight": 1.0}),
    ]
    assert estimate_effects([*records, *others], GOALS, SPACE) == expected
    stopped = [replace(record, state="pruned", validation={}, test={}) for record in records]
    assert estimate_effects(stopped, GOALS, SPACE) == expected


def test_a_replicate_counts_as_a_training_but_decides_no_step():
    records = draw_sweep(slope, count=12)
    again = [
        replace(r, number=20 + i, role="replicate", replicate_of=r.number)
        for i, r in enumerate(records)
    ]
    effects = estimate_effects([*records, *again], GOALS, SPACE)
    assert effects.trainings == 24
    late = [replace(r, rungs=(replace(r.rungs[0], step=60),)) for r in [*again, *again]]
    assert estimate_effects([*records, *late], GOALS, SPACE).step == 20


def test_a_perfect_fit_is_as_uncertain_as_its_evaluations():
    exact = draw_sweep(slope, noise=0.0, se=0.05)
    (found,) = find(estimate_effects(exact, GOALS, SPACE), "mode")
    assert found.value == pytest.approx(0.06)
    assert not found.is_told_apart
    (found,) = find(estimate_effects(draw_sweep(slope, noise=0.0), GOALS, SPACE), "mode")
    assert found.is_told_apart


def test_an_objective_that_did_not_vary_has_no_questions():
    records = [
        measure(r.number, r.params, r.rungs[0].validation["a"].mean) for r in draw_sweep(slope)
    ]
    effects = estimate_effects(records, GOALS, SPACE)
    assert effects.constant == ("b",)
    assert {c.objective for c in effects.contrasts} == {"a"}


def test_values_of_nan_and_metrics_that_are_missing_do_not_count():
    records = draw_sweep(slope, se=math.nan)
    expected = find(estimate_effects(records, ONE, SPACE), "mode")
    extra = [measure(40, {"mode": "gdpo", "weight": 1.0}, math.nan)]
    extra.append(replace(extra[0], number=41, rungs=(Rung(20, {}, Cost(1280)),)))
    assert find(estimate_effects([*records, *extra], ONE, SPACE), "mode") == expected


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_too_few_trainings_tell_nothing_but_what_it_takes(count):
    effects = estimate_effects(draw_sweep(slope, count=count), GOALS, SPACE)
    assert effects.trainings == count
    assert all(math.isnan(c.value) and not c.is_told_apart for c in effects.contrasts)
    assert all(0 < c.more < MAX_MORE for c in effects.contrasts)
    assert bool(effects.contrasts) == (count > 0)
    assert estimate_effects(draw_sweep(slope), GOALS, ()).contrasts == ()


def test_a_choice_that_nobody_trained_is_not_told():
    records = [r for r in draw_sweep(slope) if r.params["mode"] == "gdpo"]
    effects = estimate_effects(records, GOALS, SPACE)
    assert math.isnan(find(effects, "mode")[0].value)
    assert math.isfinite(find(effects, "weight")[0].value)


def test_as_many_more_trainings_as_named_tell_an_effect_apart():
    few = draw_sweep(slope, count=12, noise=0.08, seed=3)
    (found,) = find(estimate_effects(few, GOALS, SPACE), "mode")
    assert not found.is_told_apart
    assert 0 < found.more < 100
    lengths = []
    for count in (12, 12 + found.more):
        records = draw_sweep(lambda _: 0.0, count=count, noise=0.08, seed=3)
        interval = find(estimate_effects(records, GOALS, SPACE), "mode")[0].interval
        lengths.append((interval.high - interval.low) / 2)
    assert lengths[1] < lengths[0]
    assert lengths[1] <= max(0.16, abs(found.value)) * 1.3
