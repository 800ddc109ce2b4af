"""MLflow from a sweep's directory alone: sent late, or again if the database is gone."""

import shutil

import pytest
from mlflow import MlflowClient
from mlflow.store.model_registry import sqlalchemy_store as registry_store
from mlflow.store.tracking import sqlalchemy_store as tracking_store

from gdpo_tune import report
from gdpo_tune.core.errors import LedgerHeldError
from gdpo_tune.core.events import TrackingState
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Estimate, Outcome
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.tracking import mlflow_sink
from gdpo_tune.tracking.mlflow_sink import MlflowTracker
from tests.support.tracking import make_measurement, make_tiny_spec

pytestmark = [
    pytest.mark.system,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]


@pytest.fixture
def spec(tmp_path):
    """A sweep of two trials that ended without tracking."""
    spec = make_tiny_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        session = ledger.begin_session(1000.0, 1, {})
        for number in range(2):
            tried = {"learning_rate": 1e-4 * (number + 1), "normalization": "gdpo"}
            params = spec.space.complete_baseline(tried)
            ledger.start(params, "search", "model", seed=number)
            for step in range(1, 41):
                append_step(ledger.get_trial_directory(number), make_measurement(step))
            values = {"correctness": 0.5 + number / 10, "length": 0.5 - number / 10}
            estimates = {name: Estimate(value, 0.01) for name, value in values.items()}
            ledger.complete(number, Outcome(estimates, estimates, Cost(2560, 9.0, 8.0), None))
        ledger.end_session(session, "all trials are done")
    return spec


def read_content(database):
    """Return all that a person sees of each run, by name, without ids."""
    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("nightly")
    content = {}
    for run in client.search_runs([experiment.experiment_id]):
        tags = {k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")}
        curves = {
            name: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        tags.pop("pareto_view", "")
        tags.pop("sweep_id", "")
        content[run.info.run_name] = (run.info.status, tags, run.data.params, curves)
    versions = client.search_model_versions("name = 'tiny'")
    return content, sorted(version.tags["trial"] for version in versions)


def replace_database(database, empty):
    """Replace a database, once no connection of this process writes its log into the new one."""
    for store in (tracking_store.SqlAlchemyStore, registry_store.SqlAlchemyStore):
        for engine in store._engine_map.values():
            engine.dispose()
    for suffix in ("-wal", "-shm"):
        database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)
    shutil.copy(empty, database)


def test_everything_is_sent_late_and_again_if_the_database_is_gone(
    tmp_path, spec, empty_database, capsys
):
    database = tmp_path / "mlflow.db"
    replace_database(database, empty_database)
    assert mlflow_sink.sync(spec) == 0
    assert "MLflow: up to date" in capsys.readouterr().out
    first = read_content(database)
    runs, versions = first
    assert set(runs) == {"tiny", "trial-000 gdpo", "trial-001 gdpo, knee"}
    assert runs["tiny"][0] == "FINISHED"
    assert versions == ["0", "1"]
    assert [step for step, _ in runs["trial-001 gdpo, knee"][3]["train/loss"]] == list(range(1, 41))
    assert [step for step, _ in runs["tiny"][3]["hypervolume"]] == [0, 1]

    for prepare in (lambda: None, lambda: replace_database(database, empty_database)):
        prepare()
        assert mlflow_sink.sync(spec) == 0
        assert read_content(database) == first


def test_a_sweep_that_runs_sends_by_itself(spec):
    with Ledger.open(spec), pytest.raises(LedgerHeldError):
        mlflow_sink.sync(spec)


@pytest.mark.slow  # MLflow's own retries take two minutes
def test_updates_that_are_left_are_reported_and_change_the_status(tmp_path, spec, capsys):
    (tmp_path / "mlflow.db").mkdir()  # nothing can be written there
    assert report.main([str(spec.directory), "--sync"]) == 1
    assert "updates did not reach" in capsys.readouterr().err


def test_sync_says_how_much_is_left_until_the_server_fails(spec, monkeypatch, capsys):
    monkeypatch.setattr(mlflow_sink, "PRINT_SECONDS", -1.0)
    monkeypatch.setattr(mlflow_sink, "POLL_SECONDS", 0.0)
    news = [("up to date", 1_200, ""), ("catching up", 800, ""), ("away", 800, "nobody there")]
    states = iter([TrackingState(*each) for each in news])
    monkeypatch.setattr(MlflowTracker, "get_state", lambda _: next(states))
    mlflow_sink.wait_until_sent(MlflowTracker(spec))
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["MLflow: 1,200 updates left", "MLflow: 800 updates left"]


def test_a_copy_of_a_sweep_writes_no_runs_of_the_original(spec, tmp_path, capsys):
    """`cp -r` of a directory whose tracking is a server or a database elsewhere."""
    database = tmp_path / "shared.db"
    words = ["--set", f"tracking.uri=sqlite:///{database}"]
    assert report.main([str(spec.directory), "--sync", *words]) == 0
    before = list_runs(database)
    copy = spec.directory.with_name("copy")
    shutil.copytree(spec.directory, copy)
    with Ledger.open(load_copy(copy, database)) as ledger:
        again = ledger.start(ledger.get_records()[0].params, "search", "model", seed=9)
        ledger.fail(again.number, "no")
    assert f"a copy of the sweep in {spec.directory}" in capsys.readouterr().err
    assert report.main([str(copy), "--sync", *words]) == 0
    after = list_runs(database)
    assert after.items() >= before.items()
    assert len(after) == 2 * len(before) + 1


def list_runs(database):
    """Return run id -> name, status and metrics of every run."""
    client = MlflowClient(f"sqlite:///{database}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return {r.info.run_id: (r.info.run_name, r.info.status, r.data.metrics) for r in runs}


def test_a_sweep_that_was_moved_keeps_its_runs(spec, tmp_path):
    with Ledger.open(spec) as ledger:
        before = ledger.sweep_id
    moved = spec.directory.with_name("moved")
    spec.directory.rename(moved)
    for _ in range(2):
        with Ledger.open(load_copy(moved, tmp_path / "m.db")) as ledger:
            assert ledger.sweep_id == before


def load_copy(directory, database):
    file, change = directory / "spec.yaml", f"tracking.uri=sqlite:///{database}"
    return load_spec(file, [change], directory.name, to_run=False)
