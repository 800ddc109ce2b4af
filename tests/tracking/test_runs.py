"""The runs of a sweep are found again, and duplicates are deleted."""

from types import SimpleNamespace

import pytest

from gdpo_tune.tracking.mlflow_store import SweepIdentity, find_experiment, find_runs

IDENTITY = SweepIdentity("tiny", "hash", "nightly", "id")
PARENT = "mlflow.parentRunId"


class Page(list):
    token = ""


class Client:
    """A stand-in for MLflow that answers the two searches for runs."""

    def __init__(self, *runs):
        self.runs = {run.info.run_id: run for run in runs}

    def search_runs(self, experiments, query, max_results, order_by, page_token):
        tag = "sweep" if "tags.role" in query else PARENT
        return Page(run for run in self.runs.values() if tag in run.data.tags)

    def delete_run(self, run_id):
        del self.runs[run_id]


def run(run_id, tags, metrics=()):
    points = [SimpleNamespace(key=name, value=1.0, step=0) for name in metrics]
    proto = SimpleNamespace(metrics=points)
    data = SimpleNamespace(tags=tags, params={}, to_proto=lambda: proto)
    info = SimpleNamespace(run_id=run_id, start_time=0, status="RUNNING")
    return SimpleNamespace(info=info, data=data, inputs=None)


def child(run_id, trial, metrics=()):
    return run(run_id, {PARENT: "p", "trial": trial}, metrics)


def parent(run_id, sweep_id="id", metrics=(), name="tiny"):
    return run(run_id, {"sweep": name, "sweep_id": sweep_id}, metrics)


def ids(client):
    return {key: run.id for key, run in find_runs(client, "1", IDENTITY).items()}


def test_runs_by_trial():
    client = Client(parent("p"), child("a", "0"), child("b", "1"))
    assert ids(client) == {"sweep": "p", "0": "a", "1": "b"}


def test_of_duplicates_the_one_with_more_content_stays():
    client = Client(
        parent("p", metrics=["hypervolume"]),
        parent("o"),
        child("a", "0"),
        child("b", "0", ["train/loss"]),
    )
    assert ids(client) == {"sweep": "p", "0": "b"}
    assert set(client.runs) == {"p", "b"}


def test_runs_of_another_sweep_stay():
    client = Client(parent("p"), parent("o", sweep_id="other"), parent("q", name="huge"))
    assert ids(client) == {"sweep": "p"}
    assert set(client.runs) == {"p", "o", "q"}


def test_runs_that_people_nest_under_the_sweep_stay():
    notes = [run(name, {PARENT: "p", "mlflow.runName": name}) for name in ("notes", "more notes")]
    client = Client(parent("p"), child("a", "0"), *notes)
    assert ids(client) == {"sweep": "p", "0": "a"}
    assert set(client.runs) == {"p", "a", "notes", "more notes"}


def test_nothing_yet():
    assert ids(Client(parent("o", sweep_id="other"))) == {}


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("sqlite:////data/mlflow.db", "/data/mlartifacts/my_sweep"),
        ("http://host:5000", None),
    ],
)
def test_artifacts_of_a_database_lie_beside_its_file(uri, location):
    created = []

    def create_experiment(name, location, tags):
        created.append((name, location))
        return "1"

    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None, create_experiment=create_experiment
    )
    assert find_experiment(client, uri, "my sweep") == "1"
    assert created == [("my sweep", location)]
