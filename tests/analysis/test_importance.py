"""Importance of parameters: against known truths, against noise alone, and in words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.analysis.importance import (
    Change,
    Dimension,
    Effects,
    Encoder,
    ParameterEffect,
    compute_total_indices,
    describe_effect,
    describe_findings,
    estimate_effects,
    ranks_agree,
)
from gdpo_tune.analysis.uncertainty import Interval
from gdpo_tune.results.open_sweep import Sweep
from tests.support.analysis import GOALS, build_checkpoint, build_merge, build_trial
from tests.support.tuning import load_code_spec

SPACE = (
    Dimension("mode", ("gdpo", "grpo")),
    Dimension("weight", (), 0.1, 10.0, log=True),
    Dimension("idle", (), 0.0, 1.0),
)


def sweep(worth, dimensions=SPACE, seed=0, count=40, noise=0.02):
    """Simulate trials at random points; `worth` takes the parameters, numbers as -1 to 1."""
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
        a = 0.5 + worth(places) + rng.normal(0, noise)
        records.append(build_trial(number, a, 0.5, params=params))
    return build_front(records, GOALS)


def measure(front, dimensions=SPACE):
    """Return effects on `a` by parameter; `b` is constant and has none."""
    found = estimate_effects(front, dimensions)
    return {effect.parameter: effect for effect in found.estimates}


def slope(places):
    return -0.1 * places["weight"] + 0.06 * (places["mode"] == "grpo")


@cache
def estimate_slope():
    """Return a sweep whose truth is additive, and its effects."""
    front = sweep(slope)
    return front, estimate_effects(front, SPACE)


def test_shares_and_changes_of_an_additive_truth():
    known = {effect.parameter: effect for effect in estimate_slope()[1].estimates}
    variances = {"weight": 0.1**2 / 3, "mode": 0.03**2, "idle": 0.0}
    total = sum(variances.values()) + 0.02**2
    for name, effect in known.items():
        assert effect.interval.low - 0.02 <= variances[name] / total <= effect.interval.high
    assert known["weight"].importance > known["mode"].importance > known["idle"].importance
    strengths = {name: effect.strength for name, effect in known.items()}
    assert strengths == {"weight": "clear", "mode": "clear", "idle": "none"}
    (change,) = known["weight"].changes
    assert (change.before, change.after) == ("0.1", "10")
    assert change.interval.low < -0.2 < change.interval.high < 0
    (change,) = known["mode"].changes
    assert change.interval.low < 0.06 < change.interval.high


def test_parameters_that_act_only_together_are_found():
    """A linear model without interactions gives both nothing."""
    known = measure(sweep(lambda p: 0.1 * p["weight"] * (1 if p["mode"] == "grpo" else -1)))
    assert known["weight"].strength == known["mode"].strength == "clear"
    assert min(known["weight"].importance, known["mode"].importance) > 0.5
    assert known["idle"].importance < 0.1
    assert describe_effect(known["weight"]).endswith(
        "by a curve or together with other parameters."
    )


def test_a_parameter_counts_only_where_it_acts():
    """The threshold has a value in each trial, and an effect under `grpo` alone."""
    dimensions = (*SPACE, Dimension("threshold", (), 0.0, 1.0, when={"mode": ("grpo",)}))
    front = sweep(
        lambda p: 0.1 * p["threshold"] * (p["mode"] == "grpo") + 0.05 * p["weight"], dimensions
    )
    known = measure(front, dimensions)
    assert known["threshold"].importance > known["weight"].importance > known["idle"].importance
    assert known["threshold"].strength == "clear"
    (change,) = known["threshold"].changes
    assert change.interval.low < 0.2 < change.interval.high


def test_total_indices_of_a_product_are_exact():
    """f = x + x y, for x and y uniform in -1 to 1: variances 1/3 and 1/9."""
    encoder = Encoder((Dimension("x", (), -1.0, 1.0), Dimension("y", (), -1.0, 1.0)))
    corners = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, 0.0], [0.5, 0.5]])
    targets = corners[:, 0] * (1 + corners[:, 1])
    grid = encoder.draw_points(512)[:, :2]
    features = encoder.build_features(np.vstack([corners, grid]))
    targets = np.concatenate([targets, grid[:, 0] * (1 + grid[:, 1])])
    weights = np.linalg.lstsq(features, targets, rcond=None)[0]
    shares = compute_total_indices(encoder, weights[:, None], np.array([1 / 9]))
    assert shares[:, 0] == pytest.approx([4 / 5, 1 / 5], rel=0.02)


def test_noise_alone_is_seldom_an_effect():
    """Objectives whose order is not settled show nothing; of the others few effects are clear."""
    clear = [
        effect
        for seed in range(8)
        for effect in measure(sweep(lambda _: 0.0, seed=seed)).values()
        if effect.strength == "clear"
    ]
    assert len(clear) <= 1


def test_what_was_not_trained_with_these_parameters_does_not_count():
    front, expected = estimate_slope()
    others = [
        build_trial(40, 0.9, 0.9, role="untrained", params={}),
        build_checkpoint(41, 0.9, 0.9, (3, 20)),
        build_merge(42, 0.9, 0.9, (3, 60, 0.5), (4, 60, 0.5)),
        build_trial(
            43, 0.9, 0.9, role="published", params={**front.records[0].params, "idle": 2.0}
        ),
    ]
    assert estimate_effects(build_front([*front.records, *others], GOALS), SPACE) == expected


def test_too_few_configurations_are_said_with_the_number_that_it_takes():
    front = sweep(slope, count=12)
    found = estimate_effects(front, SPACE)
    assert found.estimates == ()
    _, limits = describe_findings(front, found)
    assert limits[0] == (
        "Too few configurations to say which parameters mattered: it takes "
        f"{found.needed} that were trained to the end, and this sweep has 12 (search.trials)."
    )
    assert estimate_effects(build_front([], GOALS), SPACE).estimates == ()
    assert estimate_effects(front, ()).estimates == ()


def test_proposals_that_crowd_take_more_configurations():
    found = estimate_effects(estimate_slope()[0], SPACE, crowded=True)
    assert (found.estimates, found.needed) == ((), 80)
    assert estimate_effects(sweep(slope, count=80), SPACE, crowded=True).estimates


@pytest.mark.parametrize(("sampler", "needed"), [("tpe", 80), ("gp", 25), ("auto", 25)])
def test_the_sampler_of_a_sweep_decides_how_many_it_takes(tmp_path, sampler, needed):
    spec = load_code_spec(tmp_path, [f"search.sampler={sampler}"])
    assert Sweep(spec, ()).effects.needed == needed


def test_an_objective_without_a_settled_order_is_left_out():
    front = sweep(slope)
    found = Effects((), ("a",), 40, 25)
    _, limits = describe_findings(front, found)
    assert limits[0] == (
        "Too few configurations to say which parameters mattered for a: 40 do not settle their "
        "order, about 80 would (search.trials)."
    )
    assert ranks_agree(np.array([0.5, 0.2, 0.1]), np.array([0.4, 0.1, 0.2]))
    assert not ranks_agree(np.array([0.5, 0.2, 0.1]), np.array([0.2, 0.4, 0.1]))


def test_an_objective_that_did_not_vary_is_called_so():
    """The variance of a constant is 0, so that more trials would settle no order of its shares."""
    front, found = estimate_slope()
    assert (found.constant, found.unreliable) == (("b",), ())
    _, limits = describe_findings(front, found)
    assert any(line.startswith("Did not vary: b. All 40 configurations") for line in limits)
    assert not any("(search.trials)" in line for line in limits)
    assert estimate_effects(sweep(slope, count=1), SPACE).constant == ()
    assert estimate_effects(sweep(lambda _: 1e-5, noise=1e-9), SPACE).constant == ("b",)


def build_effect(parameter, importance, low, high, *changes):
    return ParameterEffect(parameter, "a", importance, Interval(low, high), changes)


def test_no_detectable_effect_is_never_said_of_a_large_share():
    """A bar of 45 % was called without effect, because its p-value was .06."""
    effects = Effects(
        (
            build_effect("rate", 0.45, 0.002, 0.7),
            build_effect("mode", 0.03, 0.001, 0.1),
            build_effect("weight", 0.3, 0.05, 0.5),
        ),
        (),
        40,
        25,
    )
    _, limits = describe_findings(sweep(slope), effects)
    assert "Unclear: rate may explain 45 % (95 %: 0 % to 70 %) of the variance in a." in limits
    assert any(line.startswith("No detectable effect: mode. The intervals") for line in limits)


def test_a_sentence_names_the_changes_that_are_clear():
    moves = (
        Change("a", "b", 0.1, Interval(0.05, 0.15)),
        Change("a", "c", 0.1, Interval(-0.1, 0.3)),
    )
    assert describe_effect(build_effect("kind", 0.5, 0.3, 0.6, *moves)) == (
        "kind explains 50 % (95 %: 30 % to 60 %) of the variance in a: going from a to b raises "
        "it by 0.1 (0.05 to 0.15)."
    )


def test_trials_that_were_stopped_are_said_to_be_missing():
    front, found = estimate_slope()
    assert not any("Stopped early" in line for line in describe_findings(front, found)[1])
    records = list(front.records)
    records[::4] = [replace(r, state="pruned", test={}, validation={}) for r in records[::4]]
    front = build_front(records, GOALS)
    (line,) = [line for line in describe_findings(front, found)[1] if "Stopped early" in line]
    assert line.startswith("Stopped early, without a value on test prompts: 10 trials.")
