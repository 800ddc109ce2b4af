"""Checks that MLflow holds the whole sweep of `tracking_driver` exactly once."""

import time

from mlflow import MlflowClient

PATIENCE = 240.0


def find_runs(client):
    """Return the run of the sweep and its children by trial number; each must exist once."""
    experiment = client.get_experiment_by_name("nightly")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    parents = [run for run in runs if run.data.tags["role"] == "sweep"]
    assert len(parents) == 1
    children = {int(run.data.tags["trial"]): run for run in runs if "trial" in run.data.tags}
    assert len(children) == len(runs) - 1
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {
        parents[0].info.run_id
    }
    return parents[0], children


def check_whole_sweep(client):
    parent, children = find_runs(client)
    assert parent.info.run_name == "tiny"
    assert parent.info.status == "FINISHED"
    assert sorted(children) == [0, 1, 2, 3]
    for number, run in children.items():
        assert run.info.status == "FINISHED"
        assert run.info.run_name.startswith(f"trial-{number:03d} gdpo")
        assert run.data.params["learning_rate"] == str(1e-4 * (number + 1))
        assert run.data.metrics["test/correctness"] == number / 10
        assert run.data.metrics["pareto/rank"] == 0
        assert run.data.tags["pareto"] == "true"
        assert run.data.tags["mlflow.runColor"] == "#0072b2"
        assert run.data.tags.get("checkpoint", "") == ""
        assert len(run.inputs.dataset_inputs) == 3
        for name in ("train/loss", "train/reward"):
            history = client.get_metric_history(run.info.run_id, name)
            assert sorted(point.step for point in history) == list(range(1, 41))
    assert sum(run.info.run_name.endswith(", knee") for run in children.values()) == 1
    assert sorted(run.data.metrics["pareto/order"] for run in children.values()) == [1, 2, 3, 4]
    assert parent.data.params["task"] == "code"
    assert parent.data.tags["mlflow.user"]
    trace = client.get_metric_history(parent.info.run_id, "hypervolume")
    assert sorted(point.step for point in trace) == [0, 1, 2, 3]
    assert parent.data.metrics["pareto/size"] == 4
    check_registry(client, parent, children)
    check_views(client, parent)
    return parent, children


def check_registry(client, parent, children):
    versions = client.search_model_versions("name = 'tiny'")
    assert {v.run_id for v in versions} == {run.info.run_id for run in children.values()}
    assert len(versions) == 4
    by_trial = {v.tags["trial"]: v for v in versions}
    assert by_trial["3"].tags["correctness"] == "0.3"
    assert by_trial["3"].tags["correctness_se"] == "0.01"
    assert by_trial["3"].tags["sweep_run"] == parent.info.run_id
    aliases = client.get_registered_model("tiny").aliases
    assert set(aliases) == {"knee", "max_correctness", "max_length"}
    assert str(aliases["max_correctness"]) == str(by_trial["3"].version)
    assert str(aliases["max_length"]) == str(by_trial["0"].version)


def check_views(client, parent):
    experiment = client.get_experiment(parent.info.experiment_id)
    prefix = "mlflow.sharedViewState."
    keys = {key.removeprefix(prefix) for key in experiment.tags if key.startswith(prefix)}
    assert keys == {
        f"{parent.info.run_id}-{view}" for view in ("trials", "front", "modes", "progress")
    }
    link = parent.data.tags["pareto_view"]
    assert f"#/experiments/{experiment.experiment_id}/runs?" in link
    assert f"viewStateShareKey={parent.info.run_id}-trials" in link
    assert link in parent.data.tags["mlflow.note.content"]
    assert experiment.tags["mlflow.note.content"].count(link) == 1
    assert "@" not in link


def wait_until_begun(client: MlflowClient):
    deadline = time.monotonic() + PATIENCE
    while client.get_experiment_by_name("nightly") is None:
        assert time.monotonic() < deadline, "nothing was sent"
        time.sleep(0.1)
