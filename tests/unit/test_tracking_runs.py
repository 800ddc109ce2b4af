"""A sweep's runs are found again, and those that were made twice are there once."""

from types import SimpleNamespace

from gdpo_tune.tracking.mlflow_runs import find_runs
from gdpo_tune.tracking.projection import Identity

IDENTITY = Identity("tiny", "hash", "nightly", "id", adopt=False)


class Page(list):
    token = ""


class Client:
    """Stands for MLflow: answers the two questions that are asked for runs."""

    def __init__(self, *runs):
        self.runs = {run.info.run_id: run for run in runs}

    def search_runs(self, experiments, query, max_results, order_by, page_token):
        parents = "tags.role" in query
        return Page(run for run in self.runs.values() if ("trial" not in run.data.tags) == parents)

    def delete_run(self, run_id):
        del self.runs[run_id]


def run(run_id, tags, metrics=()):
    data = SimpleNamespace(tags=tags, metrics=dict.fromkeys(metrics, 1.0), params={})
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id), data=data)


def parent(run_id, sweep_id="id", metrics=(), name="tiny"):
    return run(run_id, {"sweep": name, "sweep_id": sweep_id}, metrics)


def test_runs_by_trial():
    client = Client(parent("p"), run("a", {"trial": "0"}), run("b", {"trial": "1"}))
    assert find_runs(client, "1", IDENTITY) == {"sweep": "p", "0": "a", "1": "b"}


def test_of_twins_the_one_with_more_in_it_stays():
    client = Client(
        parent("p", metrics=["hypervolume"]),
        parent("o"),
        run("a", {"trial": "0"}),
        run("b", {"trial": "0"}, ["train/loss"]),
    )
    assert find_runs(client, "1", IDENTITY) == {"sweep": "p", "0": "b"}
    assert set(client.runs) == {"p", "b"}


def test_runs_of_another_sweep_stay():
    client = Client(parent("p"), parent("o", sweep_id="other"), parent("q", name="huge"))
    assert find_runs(client, "1", IDENTITY) == {"sweep": "p"}
    assert set(client.runs) == {"p", "o", "q"}


def test_nothing_yet():
    assert find_runs(Client(parent("o", sweep_id="other")), "1", IDENTITY) == {}
