"""Tracking servers that fail while a sweep runs: everything is stored exactly once."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support.mlflow_checks import check_whole_sweep, wait_until_begun
from tests.support.mlflow_servers import PATIENCE, MlflowServer, start_driver

pytestmark = [
    pytest.mark.fault,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]

PAUSE = 0.25
"""Seconds between two steps of a trial: a trial takes ten."""
TIMEOUT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""A request to a server that hangs ends while the sweep still runs; a slow server may answer."""


@pytest.fixture
def server(tmp_path, empty_database):
    database = Path(shutil.copy(empty_database, tmp_path / "mlflow.db"))
    server = MlflowServer(tmp_path, f"sqlite:///{database}")
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize("fault", ["keep_killed", "keep_hung", "keep_failing", "keep_full"])
@pytest.mark.parametrize("begin", ["at once", "on the way"])
def test_a_server_that_fails_for_a_while_receives_everything_once(tmp_path, server, fault, begin):
    arguments = [tmp_path / "mlflow.db"] if fault == "keep_full" else []
    trouble = getattr(server, fault)(*arguments)
    client = MlflowClient(server.uri)
    if begin == "at once":
        trouble.__enter__()
    driver = start_driver(tmp_path, server.uri, PAUSE, **TIMEOUT)
    for line in driver.stdout:
        if line == "trial 1\n" and begin == "on the way":
            wait_until_begun(client)
            trouble.__enter__()
        if line == "trial 3\n":
            break
    trouble.__exit__(None, None, None)
    out, _ = driver.communicate(timeout=PATIENCE)
    assert (driver.returncode, out) == (0, "\n")
    parent, _ = check_whole_sweep(client)
    artifacts = {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"spec.yaml", "front.csv", "report.html"}


def test_a_server_that_never_comes_back_costs_one_warning(tmp_path, server):
    with server.keep_hung():
        driver = start_driver(tmp_path, server.uri, 0.0, 10.0, **TIMEOUT)
        out, _ = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0
        assert "updates did not reach" in out
        assert "--sync" in out
    again = start_driver(tmp_path, server.uri, 0.0)
    assert again.communicate(timeout=PATIENCE)[0] == "\n"
    check_whole_sweep(MlflowClient(server.uri))
