"""Costs as metrics; means with errors that are clustered by prompt, and their intervals."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from gdpo_tune.core.metrics import add_costs, estimate_mean, estimate_metrics
from gdpo_tune.core.trials import Z_95, Cost, Estimate

COST = Cost(completions=64, seconds=1800.0, cpu_seconds=900.0)


@pytest.mark.parametrize(
    ("measured", "names", "gpus", "more"),
    [
        ({}, ("correctness", "gpu_hours", "cpu_seconds"), 4, {"gpu_hours": 2, "cpu_seconds": 900}),
        ({"seconds": Estimate(3, 0.1)}, ("seconds",), 0, {}),  # a metric of the task keeps its name
        ({}, (), 1, {}),
        ({}, ("correctness",), 1, {}),
    ],
)
def test_named_costs_join_the_metrics(measured, names, gpus, more):
    measured = {"correctness": Estimate(0.5, 0.01), **measured}
    costs = {name: Estimate(value, 0) for name, value in more.items()}
    assert add_costs(measured, COST, names, gpus=gpus) == {**measured, **costs}


def estimate_share(right, prompts):
    """Estimate a share of prompts with one completion each."""
    share = right / prompts
    spread = math.sqrt(share * (1 - share) / prompts)
    ends = (0.0, 1.0) if 0 < right < prompts else (share, share)
    return estimate_mean(share, spread, prompts, *ends)


def test_mean_and_bootstrap_error():
    values = np.random.default_rng(0).normal(3, 2, size=400)
    estimate = estimate_metrics({"m": values.tolist()}, 1, 0)["m"]
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.se == pytest.approx(values.std(ddof=1) / 20, rel=0.1)
    # equal completions of a prompt leave the error
    copied = estimate_metrics({"m": np.repeat(values, 4).tolist()}, 4, 0)["m"]
    assert (copied.mean, copied.se) == pytest.approx((estimate.mean, estimate.se))


def test_a_metric_that_one_prompt_alone_has_is_left_out():
    """Source: arithmetic: the variance of a mean over n prompts needs n - 1 > 0."""
    absent, once = [None] * 6, [None, None, 0.0, 1.0, None, None]
    estimates = estimate_metrics({"a": absent, "m": [0.5, 1.0] * 3, "b": once}, 2, 0)
    assert list(estimates) == ["m"]
    assert estimate_metrics({"m": [0.0, 1.0]}, 2, 0) == {}


def test_a_missing_value_of_a_prompt_is_not_in_its_mean():
    """Source: arithmetic: prompts of means 1, 1/2 and 0, whatever number of values they have."""
    values = [1.0, None, 0.0, 1.0, None, 0.0]
    found = estimate_metrics({"m": values, "all": [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]}, 2, 0)
    assert found["all"].mean == 0.5
    assert found["m"].mean == 0.5


@pytest.mark.parametrize(("right", "low", "high"), [(32, 0.893, 1.0), (0, 0.0, 0.107)])
def test_equal_outcomes_have_a_width(right, low, high):
    """Source: Wilson 1927: n / (n + z^2) to 1 if all n are right."""
    values = [1.0] * right + [0.0] * (32 - right)
    found = estimate_metrics({"m": values}, 1, 0)["m"]
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)
    assert found.se == pytest.approx((high - low) / 2 / Z_95, abs=5e-4)
    assert found.is_constant


def test_equal_values_between_the_ends_may_hide_others_on_both_sides():
    """Source: arithmetic: z^2 of n + z^2 prompts may have any value from 0 to 1."""
    found = estimate_metrics({"m": [0.9] * 64}, 2, 0)["m"]
    unseen = Z_95**2 / (32 + Z_95**2)
    assert found.low == pytest.approx(0.9 * (1 - unseen))
    assert found.high == pytest.approx(0.9 * (1 - unseen) + unseen)


@pytest.mark.parametrize(("usual", "other"), [(0.3, 0.1 + 0.2), (1e9, 1e9 + 1e-6)])
def test_values_that_only_rounding_tells_apart_are_equal(usual, other):
    """Source: IEEE 754: a mean of them may be the lowest of them, which leaves no gap."""
    estimates = estimate_metrics({"m": [usual] * 15 + [other], "equal": [usual] * 16}, 1, 0)
    assert estimates["m"].is_constant
    assert estimates["m"].low == pytest.approx(estimates["equal"].low)
    assert estimates["m"].se == pytest.approx(estimates["equal"].se)


def test_small_values_keep_small_errors():
    values = 2e-5 + 1e-6 * np.random.default_rng(0).normal(size=128)
    found = estimate_metrics({"m": values.tolist()}, 1, 0)["m"]
    assert found.se == pytest.approx(1e-6 / math.sqrt(128), rel=0.2)
    assert not found.is_constant


def test_half_of_the_prompts_have_wilsons_interval():
    """Source: Brown, Cai and DasGupta 2001, equation 4."""
    found = estimate_share(25, 50)
    reach = Z_95 * math.sqrt(50) / (50 + Z_95**2) * math.sqrt(0.25 + Z_95**2 / 200)
    assert (found.low, found.high) == pytest.approx((0.5 - reach, 0.5 + reach))


def test_an_estimate_without_an_interval_has_that_of_a_normal_error():
    found = Estimate(0.5, 0.1)
    assert (found.low, found.high) == pytest.approx((0.5 - Z_95 * 0.1, 0.5 + Z_95 * 0.1))


@pytest.mark.parametrize("prompts", [64, 128, 256])
def test_shares_are_covered(prompts):
    """Source: the binomial distribution, summed over all outcomes."""
    found = [estimate_share(right, prompts) for right in range(prompts + 1)]
    for share in np.linspace(0.5, 0.999, 500):
        held = [estimate.low <= share <= estimate.high for estimate in found]
        assert binom.pmf(range(prompts + 1), prompts, share) @ held >= 0.93
