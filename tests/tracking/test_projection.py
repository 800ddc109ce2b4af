"""What MLflow is told of a trial, and that it is told once."""

import math

import pytest

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Objective
from gdpo_tune.tracking.curves import curve_values
from gdpo_tune.tracking.run_content import (
    Content,
    Known,
    clean_name,
    trial_content,
    trial_tags,
    trial_values,
)
from tests.support.tracking import complete, measurement, running

OBJECTIVES = (Objective("correctness", "maximize", 0.0), Objective("length", "maximize", 0.0))


def test_objectives_come_with_errors_and_beside_validation():
    values = trial_values(complete(3, 0.5, 0.25), OBJECTIVES)
    assert values == {
        "objective/correctness": 0.5,
        "objective/correctness_se": 0.01,
        "objective/length": 0.25,
        "objective/length_se": 0.02,
        "objective/correctness_validation": 0.4,
        "objective/correctness_validation_se": 0.01,
        "objective/length_validation": 0.15,
        "objective/length_validation_se": 0.02,
        "test/mean_length": 20.0,
        "test/mean_length_se": 0.5,
        "cost/completions": 2560.0,
        "cost/seconds": 12.5,
        "cost/cpu_seconds": 11.0,
    }


def test_what_is_not_finite_is_left_out():
    test = {"correctness": Estimate(math.inf, math.nan), "length": Estimate(0.5, 0.1)}
    values = trial_values(complete(0, 0, 0, test=test, validation={}), OBJECTIVES)
    assert {k for k in values if k.startswith("objective/")} == {
        "objective/length",
        "objective/length_se",
    }


def test_tags_of_a_replicate():
    record = running(7, role="replicate", proposer="replicate", replicate_of=2)
    tags = trial_tags(record, "tiny")
    assert tags["sweep"] == "tiny"
    assert tags["trial"] == "7"
    assert tags["role"] == "replicate"
    assert tags["replicate_of"] == "2"
    assert tags["normalization"] == "gdpo"
    assert tags["reason"] == ""


def test_the_tier_of_the_sandbox_is_a_tag():
    record = running(7, environment={"sandbox": "unsafe"})
    assert trial_tags(record, "tiny")["environment.sandbox"] == "unsafe"


@pytest.mark.parametrize(
    ("state", "status"),
    [("running", "RUNNING"), ("complete", "FINISHED"), ("failed", "FAILED"), ("pruned", "KILLED")],
)
def test_status(state, status):
    assert trial_content(running(0, state=state), "tiny", OBJECTIVES).status == status


def test_times_are_the_records():
    content = trial_content(complete(1, 0.1, 0.2), "tiny", OBJECTIVES)
    assert (content.start, content.end, content.time) == (1_001_000, 2_001_000, 2_001_000)


def test_names_that_mlflow_refuses_are_cleaned():
    assert clean_name("reward_weights.format") == "reward_weights.format"
    assert clean_name("train/pass@4 (%)") == "train/pass_4 ___"


def test_only_what_is_new_is_said():
    known = Known()
    content = Content(name="a", start=5, tags={"x": "1"}, params={"p": "2"}, values={"m": 3.0})
    first = known.lacks(content, now=9)
    assert first == {
        "name": "a",
        "start": 5,
        "tags": {"x": "1"},
        "params": {"p": "2"},
        "metrics": [["m", 3.0, 9, 0]],
    }
    known.learn(first)
    assert known.lacks(content, now=10) == {}
    changed = Content(tags={"x": "2"}, values={"m": 4.0}, status="FINISHED", end=11)
    assert known.lacks(changed, now=10) == {
        "tags": {"x": "2"},
        "metrics": [["m", 4.0, 10, 0]],
        "status": "FINISHED",
        "end": 11,
    }


def test_an_empty_tag_is_said_only_to_take_another_back():
    known = Known()
    known.learn(known.lacks(Content(tags={"trial": "1", "checkpoint": ""}), now=0))
    assert known.tags == {"trial": "1"}
    known.learn(known.lacks(Content(tags={"checkpoint": "folder"}), now=1))
    assert known.lacks(Content(tags={"checkpoint": ""}), now=2) == {"tags": {"checkpoint": ""}}


def test_rare_evaluations_are_all_kept():
    training = TrainingSettings(steps=1000, evaluate_every=30)
    steps = [*range(30, 1000, 30), 1000]
    metrics = {"validation/format": 1.0}
    kept = [s for s in steps if curve_values(Measurement(s, metrics, Cost()), training)]
    assert kept == steps


def test_curves_hold_finite_step_metrics_only():
    told = measurement(1, **{"train/grad_norm": math.nan, "other": 1.0})
    assert curve_values(told, TrainingSettings(steps=40)) == {
        "train/loss": 1.0,
        "train/reward": 1.0,
    }
