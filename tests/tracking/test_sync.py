"""MLflow from a sweep's folder alone: sent late, or again where the database is gone."""

import shutil

import pytest
from mlflow import MlflowClient

from gdpo_tune import report
from gdpo_tune.core.errors import LedgerHeldError
from gdpo_tune.core.steps import append_step
from gdpo_tune.core.trials import Cost, Estimate, Outcome
from gdpo_tune.ledger import Ledger
from gdpo_tune.tracking import sync
from gdpo_tune.tracking.mlflow_writer import create_database
from tests.support.tracking import measurement, tiny_spec

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    create_database(path)
    return path


@pytest.fixture
def spec(tmp_path):
    """A sweep of two trials that ended while nobody tracked it."""
    spec = tiny_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        session = ledger.begin_session(1000.0, 1, {})
        for number in range(2):
            params = {"learning_rate": 1e-4 * (number + 1), "normalization": "gdpo"}
            ledger.start(params, "search", "model", seed=number)
            for step in range(1, 41):
                append_step(ledger.trial_directory(number), measurement(step))
            found = {
                "correctness": Estimate(0.5 + number / 10, 0.01),
                "length": Estimate(0.5 - number / 10, 0.01),
            }
            ledger.complete(number, Outcome(found, found, Cost(2560, 9.0, 8.0), None))
        ledger.end_session(session, "all trials are done")
    return spec


def content(database):
    """All that a person sees of each run, by name, without ids."""
    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("nightly")
    told = {}
    for run in client.search_runs([experiment.experiment_id]):
        ours = {k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")}
        curves = {
            name: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        ours.pop("pareto_view", "")
        ours.pop("sweep_id", "")
        told[run.info.run_name] = (run.info.status, ours, run.data.params, curves)
    versions = client.search_model_versions("name = 'tiny'")
    return told, sorted(version.tags["trial"] for version in versions)


def test_everything_is_sent_late_and_again_where_the_database_is_gone(
    tmp_path, spec, empty_database, capsys
):
    database = tmp_path / "mlflow.db"
    shutil.copy(empty_database, database)
    assert sync.sync(spec) == 0
    assert "MLflow: up to date" in capsys.readouterr().out
    first = content(database)
    told, versions = first
    assert set(told) == {"tiny", "trial-000", "trial-001"}
    assert told["tiny"][0] == "FINISHED"
    assert versions == ["0", "1"]
    assert [step for step, _ in told["trial-001"][3]["train/loss"]] == list(range(1, 41))
    assert [step for step, _ in told["tiny"][3]["hypervolume"]] == [0, 1]

    assert sync.sync(spec) == 0
    assert content(database) == first

    shutil.copy(empty_database, database)
    assert sync.sync(spec) == 0
    assert content(database) == first

    shutil.copy(empty_database, database)
    for left in spec.directory.glob("spool*"):
        left.unlink()
    assert sync.sync(spec) == 0
    assert content(database) == first


def test_a_sweep_that_runs_sends_by_itself(spec):
    with Ledger.open(spec), pytest.raises(LedgerHeldError):
        sync.sync(spec)


@pytest.mark.slow  # MLflow's own retries take two minutes
def test_what_is_left_is_told_and_the_status_says_so(tmp_path, spec, monkeypatch, capsys):
    monkeypatch.setattr(sync, "PATIENCE", 0.5)
    (tmp_path / "mlflow.db").mkdir()  # nothing can be written there
    assert report.main([str(spec.directory), "--sync"]) == 1
    assert "updates did not reach" in capsys.readouterr().err
