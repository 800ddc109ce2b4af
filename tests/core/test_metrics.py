"""Costs as metrics."""

import pytest

from gdpo_tune.core.metrics import add_costs
from gdpo_tune.core.trials import Cost, Estimate

COST = Cost(completions=64, seconds=1800.0, cpu_seconds=900.0)


def test_named_costs_join_the_metrics():
    measured = {"correctness": Estimate(0.5, 0.01)}
    metrics = add_costs(measured, COST, ("correctness", "gpu_hours", "cpu_seconds"), gpus=4)
    assert metrics == {**measured, "gpu_hours": Estimate(2, 0), "cpu_seconds": Estimate(900, 0)}


def test_a_metric_of_the_task_keeps_its_name():
    own = {"seconds": Estimate(3, 0.1)}
    assert add_costs(own, COST, ("seconds",), gpus=0) == own


@pytest.mark.parametrize("names", [(), ("correctness",)])
def test_other_costs_stay_out(names):
    assert add_costs({}, COST, names, gpus=1) == {}
