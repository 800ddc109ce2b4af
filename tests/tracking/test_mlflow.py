"""Sweeps without training against real MLflow: a SQLite file, a server, a server with users."""

import shutil
import socket
import urllib.request
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from gdpo_tune.core.events import SweepFinished, SweepStarted, TrialFinished
from gdpo_tune.policies.load_policy import resolve_policy
from gdpo_tune.tracking.mlflow_sink import MlflowTracker
from gdpo_tune.tracking.server import create_database
from tests.support import tracking_driver
from tests.support.mlflow_checks import check_whole_sweep, find_runs
from tests.support.mlflow_servers import PATIENCE, MlflowServer, run_postgres, start_driver
from tests.support.tracking import make_complete_trial, make_tiny_spec

pytestmark = [
    pytest.mark.system,
    pytest.mark.integration,
    # MLflow's own tables use an option that SQLAlchemy 2.1 calls deprecated.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def database(tmp_path_factory, empty_database):
    """A SQLite file that a whole sweep was sent to."""
    directory = tmp_path_factory.mktemp("database")
    shutil.copy(empty_database, directory / "mlflow.db")
    uri = f"sqlite:///{directory / 'mlflow.db'}"
    assert tracking_driver.main(directory, uri) == ""
    return directory, MlflowClient(uri)


@pytest.fixture
def server(tmp_path):
    """A function that starts an MLflow server on a store; it is killed at the end."""
    servers = []

    def start(store, *options, **environment):
        servers.append(MlflowServer(tmp_path, store, *options, **environment))
        servers[-1].start()
        return servers[-1].uri

    yield start
    for started in servers:
        started.kill()


def test_a_sweep_is_all_there(database):
    directory, client = database
    parent, _ = check_whole_sweep(client)
    artifacts = {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"spec.yaml", "front.csv", "report.html"}
    assert "4 trials complete" in parent.data.tags["mlflow.note.content"]
    assert (directory / "mlartifacts").is_dir()


def test_the_same_command_again_changes_nothing(database):
    directory, client = database
    sweep_before, before = find_runs(client)
    assert tracking_driver.main(directory, f"sqlite:///{directory / 'mlflow.db'}") == ""
    sweep_after, after = check_whole_sweep(client)
    assert sweep_after.to_dictionary() == sweep_before.to_dictionary()
    stored = ({n: run.to_dictionary() for n, run in runs.items()} for runs in (before, after))
    assert next(stored) == next(stored)


def test_a_run_that_a_person_deleted_or_renamed_stays_so(database):
    """mlflow-export-import#178: a second start made what a person did in MLflow's page undone."""
    directory, client = database
    runs = find_runs(client)[1]
    client.delete_run(runs[2].info.run_id)
    client.update_run(runs[1].info.run_id, name="the one we ship")
    assert tracking_driver.main(directory, f"sqlite:///{directory / 'mlflow.db'}") == ""
    left = find_runs(client)[1]
    assert sorted(left) == [0, 1, 3]
    assert left[1].info.run_name == "the one we ship"
    client.restore_run(runs[2].info.run_id)
    client.update_run(runs[1].info.run_id, name=runs[1].info.run_name)
    assert tracking_driver.main(directory, f"sqlite:///{directory / 'mlflow.db'}") == ""
    check_whole_sweep(client)


def test_a_killed_sweep_continues_without_duplicate_runs(tmp_path, store):
    driver = start_driver(tmp_path, store, 0.03)
    for line in driver.stdout:
        if line == "trial 2\n":
            break
    driver.kill()
    driver.communicate()
    again = start_driver(tmp_path, store, 0.0)
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    assert out == "trial 2\ntrial 3\n\n"
    assert err == ""
    check_whole_sweep(MlflowClient(store))


def test_a_database_is_there_whole_or_not_at_all(tmp_path, monkeypatch, empty_database):
    class Cut:
        """A client that is stopped half-way through making its tables."""

        def __init__(self, tracking_uri, registry_uri):
            self.path = Path(tracking_uri.removeprefix("sqlite:///"))

        def search_experiments(self, max_results):
            self.path.write_bytes(empty_database.read_bytes()[:4096])
            raise SystemExit

    path = tmp_path / "new" / "mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient", Cut)
        with pytest.raises(SystemExit):
            create_database(path)
    assert list(path.parent.iterdir()) == []
    assert MlflowClient(f"sqlite:///{empty_database}").search_experiments()[0].name == "Default"


def test_the_ui_on_the_file_shows_the_artifacts(database, server):
    directory, client = database
    parent = find_runs(client)[0].info.run_id
    uri = server(f"sqlite:///{directory / 'mlflow.db'}")
    for name, content in (("report.html", "a report"), ("front.csv", "correctness")):
        page = f"{uri}/get-artifact?path={name}&run_uuid={parent}"
        with urllib.request.urlopen(page, timeout=PATIENCE) as answer:
            assert content in answer.read().decode()


def test_a_server_that_does_not_answer_costs_a_warning(tmp_path, store, capsys):
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{bound.getsockname()[1]}"
        warning = tracking_driver.main(tmp_path, uri, timeout=0.5)
    assert "did not reach" in warning
    assert "every update is kept" in capsys.readouterr().err

    assert tracking_driver.main(tmp_path, store) == ""
    check_whole_sweep(MlflowClient(store))


USERS = """
[mlflow]
default_permission = READ
database_uri = sqlite:///{directory}/users.db
admin_username = me
admin_password = right-password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


@pytest.mark.slow
def test_a_wrong_password_is_reported_and_loses_nothing(
    tmp_path, store, server, monkeypatch, capsys
):
    pytest.importorskip("flask_wtf", reason="mlflow[auth] is not installed")
    (tmp_path / "users.ini").write_text(USERS.format(directory=tmp_path))
    users = {"MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "users.ini")}
    users["MLFLOW_FLASK_SERVER_SECRET_KEY"] = "secret"
    uri = server(store, "--app-name", "basic-auth", **users)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-password")
    warning = tracking_driver.main(tmp_path, uri, timeout=5)
    problem = "rejects MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    assert problem in warning
    assert "are kept in" in warning
    assert problem in capsys.readouterr().err

    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "right-password")
    assert tracking_driver.main(tmp_path, uri) == ""
    check_whole_sweep(MlflowClient(uri))


@pytest.mark.parametrize(
    "through_server",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["database", "server"],
)
def test_postgresql(tmp_path, server, monkeypatch, through_server):
    pytest.importorskip("psycopg2")
    monkeypatch.chdir(tmp_path)  # where MLflow puts the artifacts of a database
    with run_postgres() as database:
        uri = server(database) if through_server else database
        for _ in range(2):
            assert tracking_driver.main(tmp_path, uri) == ""
            check_whole_sweep(MlflowClient(uri))


def test_a_registered_policy_is_loaded_where_it_lies_and_generates(tmp_path, store, monkeypatch):
    spec = make_tiny_spec(tmp_path, f"tracking.uri={store}")
    record = make_complete_trial(0, 0.9, 0.1, checkpoint=Path(resolve_policy("embedded")))
    with MlflowTracker(spec) as sink:
        sink(SweepStarted(()))
        sink(TrialFinished(record))
        sink(SweepFinished((record,), interrupted=False))
    mlflow.set_tracking_uri(store)
    monkeypatch.setattr("mlflow.transformers.is_gpu_available", lambda: False)
    pipeline = mlflow.transformers.load_model("models:/tiny@knee")
    assert pipeline.model.name_or_path == str(resolve_policy("embedded"))
    (completion,) = pipeline("Write f(x): k is 17, plus 9\n", max_new_tokens=8)
    assert len(completion["generated_text"]) > len("Write f(x): k is 17, plus 9\n")
    files = {path.name for path in (tmp_path / "mlartifacts").rglob("policy/*")}
    assert files == {"MLmodel", "README.md"}, "the policy is not copied"
