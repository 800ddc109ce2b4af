"""Costs as metrics."""

import pytest

from gdpo_tune.core.costs import priced
from gdpo_tune.core.trials import Cost, Estimate

COST = Cost(completions=64, seconds=1800.0, cpu_seconds=900.0)


def test_costs_that_are_asked_for_join_the_metrics():
    measured = {"correctness": Estimate(0.5, 0.01)}
    found = priced(measured, COST, ("correctness", "gpu_hours", "cpu_seconds"), gpus=4)
    assert found == {**measured, "gpu_hours": Estimate(2, 0), "cpu_seconds": Estimate(900, 0)}


def test_a_metric_of_the_task_keeps_its_name():
    own = {"seconds": Estimate(3, 0.1)}
    assert priced(own, COST, ("seconds",), gpus=0) == own


@pytest.mark.parametrize("names", [(), ("correctness",)])
def test_what_nobody_asks_for_stays_out(names):
    assert priced({}, COST, names, gpus=1) == {}
