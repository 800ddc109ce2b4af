"""MLflow is asked with its own client, before a sweep begins."""

import http.server
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from gdpo_tune.core.errors import TrackingError
from gdpo_tune.spec import load_spec
from gdpo_tune.tracking import server
from gdpo_tune.tracking.server import (
    ServerUnavailable,
    check_server,
    find_uri_problem,
    make_absolute,
    set_environment,
)
from tests.support.tracking import SPACE, make_tiny_spec

HEAD = "SELECT version_num FROM alembic_version"
TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"
REQUIRED = "tracking.required=true"


@pytest.fixture
def stand_in():
    """An HTTP server that answers every request with `status` and `body`; it may `wait`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status, body, requests = 200, b"{}", []
        go_on = threading.Event()

        def do_GET(self):
            Handler.requests.append(self.path)
            Handler.go_on.wait()
            self.send_response(Handler.status)
            self.end_headers()
            self.wfile.write(Handler.body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    Handler.go_on.set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        Handler.uri = f"http://127.0.0.1:{httpd.server_port}"
        yield Handler
        Handler.go_on.set()
        httpd.shutdown()
        thread.join()


@pytest.fixture
def check(tmp_path):
    """Check the server of a sweep."""
    return lambda *overrides, to=tmp_path: check_server(make_tiny_spec(to, *overrides))


@pytest.fixture
def refuse(check):
    """Return why a sweep that requires MLflow is refused."""

    def refuse(*overrides):
        with pytest.raises(TrackingError, match=r"and tracking\.required is true") as raised:
            check(REQUIRED, *overrides)
        assert raised.value.exit_status == 2
        return str(raised.value)

    return refuse


def execute(database, statement, *values):
    with closing(sqlite3.connect(database)) as link:
        rows = link.execute(statement, values).fetchall()
        link.commit()
    return rows


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (
            *(403, b'{"error_code": "PERMISSION_DENIED", "message": "no"}'),
            "): RestException: PERMISSION_DENIED: no",
        ),
        (
            *(401, b'{"error_code": "UNAUTHENTICATED", "message": "no"}'),
            "it rejects MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        ),
        (200, b"<!doctype html>", "not in a valid JSON format"),
    ],
)
def test_a_server_that_refuses(refuse, stand_in, status, body, reason):
    stand_in.status, stand_in.body = status, body
    uri = f"tracking.uri={stand_in.uri}"
    message = refuse(uri)
    assert f"({'--set'} {uri}): " in message
    assert reason in message


def test_a_server_that_hangs_costs_a_bounded_time(check, stand_in, monkeypatch, capsys):
    """MLflow's client would wait for MLFLOW_HTTP_REQUEST_TIMEOUT, which is a user's to raise."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3600")
    monkeypatch.setattr(server, "SERVER_SECONDS", 0.2)
    stand_in.go_on.clear()
    check(f"tracking.uri={stand_in.uri}")
    assert "no answer within 0.2 s; every update is kept" in capsys.readouterr().err
    assert stand_in.requests


def test_a_server_that_is_missing(check, capsys):
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{bound.getsockname()[1]}"
        check(f"tracking.uri={uri}")
    warning = capsys.readouterr().err
    assert warning.startswith("warning: tracking.uri = http://me:***@127.0.0.1")
    assert "every update is kept and sent later" in warning
    assert "secret" not in warning


def test_the_message_names_the_line_of_the_file(tmp_path):
    path = tmp_path / "sweep.yaml"
    section = 'tracking: {uri: "http://host:5000/#/experiments/3", required: true}'
    path.write_text(SPACE.replace("tracking: {experiment: nightly}", section))
    line = SPACE.splitlines().index("tracking: {experiment: nightly}") + 1
    with pytest.raises(TrackingError, match=rf"\({path}:{line}\): a browser's page"):
        check_server(load_spec(path))


DATABASE = "write sqlite:///mlflow.db"


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        (
            "http://me:secret@host:5000/#/experiments/3",
            "a browser's page: write http://me:***@host:5000",
        ),
        # mlflow.org, "Backend Stores": the file store takes the place of a database, and is old
        *((uri, DATABASE) for uri in ("./mlruns", "mlruns", "/data/mlruns", "file:///data/mlruns")),
        # other stores are left to MLflow
        *((uri, "") for uri in ("http://host:5000", "databricks", "databricks-uc")),
        ("postgresql+psycopg2://host/db", ""),
    ],
)
def test_addresses(uri, problem):
    found = find_uri_problem(uri)
    assert found.endswith(problem) if problem == DATABASE else found == problem


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a'b\"c"])
def test_paths_that_mlflow_reads_as_another_are_refused(tmp_path, name, monkeypatch):
    """SQLAlchemy's `make_url` ends the path at `?`, and decodes `%20`.

    `SqlAlchemyStore` writes the current directory into SQL as Python does: with both quotes it has
    a backslash, which SQL does not read as Python does.
    """
    directory = tmp_path / name
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert f"in {directory}/mlflow.db" in find_uri_problem("sqlite:///mlflow.db")
    with pytest.raises(ServerUnavailable, match="MLflow misreads"):
        server.open_client(make_absolute("sqlite:///mlflow.db"))
    assert [path.name for path in tmp_path.iterdir()] == [name], "no other file is created"


def test_other_paths_work(check, tmp_path, empty_database, monkeypatch):
    """All that shells, YAML and URLs treat specially, and SQLAlchemy does not."""
    directory = tmp_path / 'it\'s a "50% #1" & [my] sweep; $x'
    directory.mkdir()
    shutil.copy(empty_database, directory)
    monkeypatch.chdir(directory)
    check("storage=runs", "tracking.uri=sqlite:///mlflow.db", REQUIRED)
    (tmp_path / "tiny.yaml").unlink()
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    assert (directory / "mlartifacts" / "nightly").exists()


def test_files_that_cannot_be_a_database(refuse, tmp_path):
    for path in ("new/folder/mlflow.db", "50%.db", "our #1.db"):
        assert find_uri_problem(f"sqlite:///{tmp_path}/{path}") == ""
    assert find_uri_problem(f"sqlite:///{tmp_path}") == "it is not a file"
    assert "it cannot be opened" in find_uri_problem(f"sqlite:///{'x' * 300}")
    (tmp_path / "mlflow.db").write_text("not a database\n")
    assert "file is not a database" in refuse()


@pytest.mark.parametrize("found", ["0584bdc529eb", "ffffffffffff"], ids=["older", "newer"])
def test_the_database_of_another_mlflow_is_refused_and_left_alone(refuse, tmp_path, store, found):
    """`SqlAlchemyStore` migrates a database that lacks one of its tables, without a word."""
    database = tmp_path / "mlflow.db"
    execute(database, "UPDATE alembic_version SET version_num = ?", found)
    execute(database, "DROP TABLE webhook_events")
    tables = execute(database, TABLES)
    message = refuse()
    assert f"its schema is {found}, MLflow" in message
    assert "mlflow db upgrade" in message
    assert (execute(database, HEAD), execute(database, TABLES)) == ([(found,)], tables)


def test_test_runs_leave_no_litter(check, tmp_path, store):
    """MLflow keeps deleted runs until `mlflow gc`: a second start restores the one of the first."""
    for _ in range(2):
        check(REQUIRED)
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("nightly").experiment_id
    assert client.search_runs([experiment]) == []
    (run,) = client.search_runs([experiment], run_view_type=ViewType.ALL)
    assert run.info.lifecycle_stage == "deleted"
    assert [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()] == []


def test_a_store_without_room_for_artifacts(refuse, tmp_path, store):
    (tmp_path / "full").write_text("")
    MlflowClient(store).create_experiment("nightly", str(tmp_path / "full"))
    assert f"{tmp_path}/full/" in (reason := refuse())
    assert "takes no artifact: NotADirectoryError" in reason
    assert MlflowClient(store).search_runs(["1"]) == [], "the test run is deleted all the same"


def test_an_experiment_that_was_deleted_is_restored(check, store):
    client = MlflowClient(store)
    client.delete_experiment(client.create_experiment("nightly"))
    check(REQUIRED)
    assert client.get_experiment_by_name("nightly").lifecycle_stage == "active"


def test_an_experiment_may_have_a_longer_name_than_a_directory(check, tmp_path, store):
    """MLflow takes 500 characters, and the usual disks 255 bytes (`NAME_MAX`)."""
    check(REQUIRED, f"tracking.experiment={'ü' * 500}")
    check(REQUIRED, 'tracking.experiment=".."')
    location = Path(MlflowClient(store).get_experiment_by_name("..").artifact_location)
    assert location.is_relative_to(tmp_path / "mlartifacts")


def test_a_file_that_is_missing_is_created_only_if_it_is_required(check, tmp_path):
    check()
    assert not (tmp_path / "mlflow.db").exists()


def test_artifacts_follow_a_database_that_has_moved(check, tmp_path, empty_database, capsys):
    """MLflow stores absolute paths of artifacts, in experiments and runs."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    before = f"sqlite:///{shutil.copy(empty_database, old / 'mlflow.db')}"
    client = server.open_client(before)
    run = client.create_run(server.find_experiment(client, before, "nightly")).info.run_id
    client.log_text(run, "kept", "note.txt")
    other = client.create_experiment("by hand", "s3://bucket/mlartifacts")
    old.rename(new)

    check(REQUIRED, to=new)
    assert f"artifacts are in {new}/mlartifacts/nightly" in capsys.readouterr().err
    assert not old.exists(), "nothing is written to the old path"
    client = MlflowClient(f"sqlite:///{new}/mlflow.db")
    assert [entry.path for entry in client.list_artifacts(run)] == ["note.txt"]
    assert client.get_experiment(other).artifact_location == "s3://bucket/mlartifacts"
    check(REQUIRED, to=new)
    assert capsys.readouterr().err == ""


def test_the_check_imports_neither_mlflow_nor_numpy():
    code = (
        "import sys; from gdpo_tune.tracking import mlflow_sink, server, sweep_notifier;"
        "assert not {'mlflow', 'numpy', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_relative_database_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_absolute("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert make_absolute("http://host:5000") == "http://host:5000"


def test_the_users_environment_wins(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MLFLOW_HTTP_REQUEST_TIMEOUT": "7"})
    set_environment()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"


@pytest.mark.parametrize(
    ("uri", "location"),
    [("sqlite:////data/mlflow.db", "/data/mlartifacts/my_sweep"), ("http://host:5000", None)],
)
def test_artifacts_of_a_database_lie_beside_its_file(uri, location):
    created = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name, location, tags: created.append((name, location)) or "1",
    )
    assert server.find_experiment(client, uri, "my sweep") == "1"
    assert created == [("my sweep", location)]
