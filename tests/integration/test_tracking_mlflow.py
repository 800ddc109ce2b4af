"""Sweeps without training against real MLflow: a SQLite file, a server, a server that dies."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tracking_driver
from mlflow import MlflowClient

from gdpo_tune.tracking.mlflow_writer import create_database

DRIVER = Path(tracking_driver.__file__)
ROOT = DRIVER.parents[2]
PATIENCE = 60.0

pytestmark = [
    pytest.mark.integration,
    # MLflow's own tables use an option that SQLAlchemy 2.1 calls deprecated.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]


def start_driver(folder, uri, pause):
    return subprocess.Popen(
        [sys.executable, str(DRIVER), str(folder), uri, str(pause)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def runs_of(client):
    """The parent and its children by trial number; each must be there once."""
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
    parent, children = runs_of(client)
    assert parent.info.run_name == "tiny"
    assert parent.info.status == "FINISHED"
    assert sorted(children) == [0, 1, 2, 3]
    for number, run in children.items():
        assert run.info.status == "FINISHED"
        assert run.info.run_name == f"trial-{number:03d}"
        assert run.data.params["learning_rate"] == str(1e-4 * (number + 1))
        assert run.data.metrics["objective/correctness"] == number / 10
        assert run.data.metrics["pareto/rank"] == 0
        assert run.data.tags["pareto"] == "true"
        assert run.data.tags["checkpoint"] == ""
        for name in ("train/loss", "train/reward"):
            history = client.get_metric_history(run.info.run_id, name)
            assert sorted(point.step for point in history) == list(range(1, 41))
    trace = client.get_metric_history(parent.info.run_id, "hypervolume")
    assert sorted(point.step for point in trace) == [0, 1, 2, 3]
    assert parent.data.metrics["pareto/size"] == 4
    return parent, children


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """A SQLite file with MLflow's tables, which take it seconds to create."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    create_database(path)
    return path


@pytest.fixture(scope="module")
def database(tmp_path_factory, empty_database):
    """A SQLite file that a whole sweep was sent to."""
    folder = tmp_path_factory.mktemp("database")
    shutil.copy(empty_database, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    assert tracking_driver.main(folder, uri) == ""
    return folder, MlflowClient(uri)


@pytest.fixture
def store(tmp_path, empty_database):
    """URI of a SQLite file that holds nothing yet."""
    return f"sqlite:///{shutil.copy(empty_database, tmp_path / 'mlflow.db')}"


@pytest.fixture
def server(tmp_path):
    """A function that starts an MLflow server, always at the same address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = []

    def start(store):
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
        command += ["--artifacts-destination", str(tmp_path / "served"), "--workers", "1"]
        log = (tmp_path / "server.log").open("a")
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        processes.append(process)
        wait_for(f"http://127.0.0.1:{port}/health")
        return f"http://127.0.0.1:{port}", process

    yield start
    for process in processes:
        kill_group(process)


def kill_group(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(url):
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def wait_until_begun(client):
    deadline = time.monotonic() + PATIENCE
    while client.get_experiment_by_name("nightly") is None:
        assert time.monotonic() < deadline, "nothing was sent"
        time.sleep(0.1)


def test_a_sweep_is_all_there(database):
    folder, client = database
    parent, _ = check_whole_sweep(client)
    artifacts = {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"spec.yaml", "front.csv", "report.html"}
    assert "4 trials complete" in parent.data.tags["mlflow.note.content"]
    assert (folder / "mlartifacts").is_dir()


def test_the_same_command_again_changes_nothing(database):
    folder, client = database
    sweep_before, before = runs_of(client)
    assert tracking_driver.main(folder, f"sqlite:///{folder / 'mlflow.db'}") == ""
    sweep_after, after = check_whole_sweep(client)
    assert sweep_after.to_dictionary() == sweep_before.to_dictionary()
    assert {n: run.to_dictionary() for n, run in after.items()} == {
        n: run.to_dictionary() for n, run in before.items()
    }


def test_a_run_that_was_deleted_is_written_again(database):
    folder, client = database
    client.delete_run(runs_of(client)[1][2].info.run_id)
    assert tracking_driver.main(folder, f"sqlite:///{folder / 'mlflow.db'}") == ""
    check_whole_sweep(client)


def test_a_spool_that_was_lost_makes_no_second_runs(database):
    folder, client = database
    before = runs_of(client)[0].info.run_id
    (folder / "runs" / "tiny" / "spool.jsonl").unlink()
    assert tracking_driver.main(folder, f"sqlite:///{folder / 'mlflow.db'}") == ""
    assert check_whole_sweep(client)[0].info.run_id == before


def test_a_message_delivered_twice_is_stored_once(database):
    folder, client = database
    (folder / "runs" / "tiny" / "spool.offset").unlink()
    assert tracking_driver.main(folder, f"sqlite:///{folder / 'mlflow.db'}") == ""
    check_whole_sweep(client)


def test_a_killed_sweep_goes_on_without_second_runs(tmp_path, store):
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


def test_a_server_that_dies_for_a_while_gets_everything(tmp_path, store, server):
    uri, process = server(store)
    driver = start_driver(tmp_path, uri, 0.03)
    for line in driver.stdout:
        if line == "trial 1\n":
            wait_until_begun(MlflowClient(uri))
            kill_group(process)
        if line == "trial 3\n":
            break
    server(store)
    out, err = driver.communicate(timeout=PATIENCE)
    assert (driver.returncode, out, err) == (0, "\n", "")
    client = MlflowClient(uri)
    parent, _ = check_whole_sweep(client)
    assert len(client.list_artifacts(parent.info.run_id)) == 3


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
    folder, client = database
    parent = runs_of(client)[0].info.run_id
    uri, _ = server(f"sqlite:///{folder / 'mlflow.db'}")
    for name, content in (("report.html", "a report"), ("front.csv", "correctness")):
        page = f"{uri}/get-artifact?path={name}&run_uuid={parent}"
        with urllib.request.urlopen(page, timeout=PATIENCE) as answer:
            assert content in answer.read().decode()


def test_a_server_that_is_not_there_costs_a_warning(tmp_path, store, capsys):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{found.getsockname()[1]}"
        warning = tracking_driver.main(tmp_path, uri, timeout=0.5)
    assert "did not reach" in warning
    assert "kept and sent" in capsys.readouterr().err

    assert tracking_driver.main(tmp_path, store) == ""
    check_whole_sweep(MlflowClient(store))
