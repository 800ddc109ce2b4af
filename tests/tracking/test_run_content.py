"""The content of the run of a trial, and of its points."""

import math
from dataclasses import replace

import pytest

from gdpo_tune.core.events import SweepStarted
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Part, TrialRecord
from gdpo_tune.tracking.desired_runs import DesiredRuns
from gdpo_tune.tracking.run_content import (
    SWEEP,
    build_sweep_content,
    build_trial_content,
    clean_name,
    select_curve_values,
)
from gdpo_tune.tracking.views import Site
from tests.support.tracking import (
    make_complete_trial,
    make_measurement,
    make_running_trial,
    make_tiny_spec,
)
from tests.support.tuning import load_code_spec


def values_of(record):
    values = build_trial_content(record, "tiny").values
    return {name: value for name, (value, _) in values.items()}


def test_every_metric_has_one_name_and_its_error():
    values = values_of(make_complete_trial(3, 0.5, 0.25))
    assert values == {
        "test/correctness": 0.5,
        "test/correctness_se": 0.01,
        "test/length": 0.25,
        "test/length_se": 0.02,
        "test/mean_length": 20.0,
        "test/mean_length_se": 0.5,
        "validation/correctness_se": 0.01,
        "validation/length_se": 0.02,
        "validation/mean_length_se": 0.5,
        "cost/completions": 2560.0,
        "cost/seconds": 12.5,
        "cost/cpu_seconds": 11.0,
        "cost/evaluation_completions": 0.0,
    }


def test_values_that_are_not_finite_are_left_out():
    test = {"correctness": Estimate(math.inf, math.nan), "length": Estimate(0.5, 0.1)}
    values = values_of(make_complete_trial(0, 0, 0, test=test, validation={}))
    assert {k for k in values if k.startswith("test/")} == {"test/length", "test/length_se"}


def test_tags_of_a_replicate():
    record = make_running_trial(7, role="replicate", proposer="replicate", replicate_of=2)
    tags = build_trial_content(replace(record, environment={"sandbox": "unsafe"}), "tiny").tags
    expected = {"sweep": "tiny", "trial": "7", "role": "replicate", "replicate_of": "2"}
    expected |= {"normalization": "gdpo", "reason": "", "environment.sandbox": "unsafe"}
    assert expected.items() <= tags.items()


PARTS = (Part(2, 40, 0.5), Part(3, 60, 0.5))


@pytest.mark.parametrize(
    ("role", "parts", "name", "shown"),
    [
        ("untrained", (), "trial-007 untrained", ""),
        ("merge", PARTS, "merge-7", "0.5 x 2@40 + 0.5 x 3@60"),
        ("checkpoint", (Part(2, 40, 1.0),), "2@40", "2@40"),
    ],
)
def test_a_trial_that_trains_nothing_has_the_name_of_its_candidate_and_no_parameters(
    role, parts, name, shown
):
    run = build_trial_content(make_running_trial(7, role=role, parts=parts), "tiny")
    assert (run.name, run.params) == (name, {})
    assert (run.tags["normalization"], run.tags["parts"]) == ("", shown)
    assert run.tags["candidate"] == ("7" if role == "untrained" else name)
    trained = build_trial_content(make_running_trial(7), "tiny")
    assert (trained.name, trained.params["seed"]) == ("trial-007 gdpo", "7")
    assert (trained.tags["candidate"], trained.tags["parts"]) == ("7", "")


def test_the_run_of_the_sweep_has_parameters_a_user_and_a_source(tmp_path):
    spec = make_tiny_spec(tmp_path)
    spec.directory.mkdir(parents=True)
    run = build_sweep_content(spec, "link", [])
    assert (run.params["task"], run.params["scoring"]) == ("code", "strict")
    assert run.params["training.steps"] == "40"
    assert run.params["space.learning_rate"] == '{"log": [1e-05, 0.001]}'
    assert run.tags["search.trials"] == "16"
    assert run.tags["mlflow.user"] == spec.directory.owner()
    assert run.tags["mlflow.source.name"].startswith("python -m gdpo_tune.sweep ")


@pytest.mark.parametrize(
    ("state", "status"),
    [("running", "RUNNING"), ("complete", "FINISHED"), ("failed", "FAILED"), ("pruned", "KILLED")],
)
def test_status(state, status):
    assert build_trial_content(make_running_trial(0, state=state), "tiny").status == status


def test_times_are_the_records():
    run = build_trial_content(make_complete_trial(1, 0.1, 0.2), "tiny")
    assert (run.start, run.end) == (1_001_000, 2_001_000)
    assert {when for _, when in run.values.values()} == {2_001_000}
    lost = build_trial_content(make_running_trial(1, state="failed"), "tiny")  # its end is unknown
    assert {when for _, when in lost.values.values()} == {1_001_000}


def test_names_that_mlflow_refuses_are_cleaned():
    assert clean_name("reward_weights.format") == "reward_weights.format"
    assert clean_name("train/pass@4 (%)") == "train/pass_4 ___"


def test_rare_evaluations_are_all_kept():
    training = TrainingSettings(steps=1000, evaluate_every=30)
    steps = [*range(30, 1000, 30), 1000]
    metrics = {"validation/format": 1.0}
    kept = [s for s in steps if select_curve_values(Measurement(s, metrics, Cost()), training)]
    assert kept == steps


def test_curves_hold_finite_step_metrics_only():
    reported = make_measurement(1, **{"train/grad_norm": math.nan, "other": 1.0})
    assert select_curve_values(reported, TrainingSettings(steps=40)) == {
        "train/loss": 1.0,
        "train/reward": 1.0,
    }


CANARY = "kanarie"


def test_of_a_private_sweep_no_text_and_no_place_leaves(tmp_path):
    spec = load_code_spec(tmp_path / CANARY, ["tracking.private=true"])
    params = spec.space.complete_baseline({})
    metrics = {"train/loss": 0.5, f"train/{CANARY}": 1.0, f"train/rewards/{CANARY}/mean": 1.0}
    directory = spec.directory / "trials" / "0"
    directory.mkdir(parents=True)
    append_step(directory, Measurement(1, metrics, Cost(64, 1.0)))
    record = TrialRecord(
        *(0, "search", "failed", params, 7, "model"),
        reason=CANARY,
        content=CANARY,
        directory=directory,
        environment={CANARY: CANARY, "sandbox": CANARY},
        checkpoint=directory / "checkpoint-1",
    )
    runs = DesiredRuns(spec)
    runs.take(SweepStarted((record,)))
    site = Site("http://tracking", "1", "parent")
    run = runs.build("0", site, None)
    assert [name for name, *_ in run.curves] == ["train/loss"]
    assert CANARY not in repr(run)
    sweep = runs.build(SWEEP, site, None)
    assert CANARY not in repr({**vars(sweep), "files": sweep.files["spec.yaml"]})
    assert "report.html" not in sweep.files
