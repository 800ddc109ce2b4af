"""A tracking server that does not answer is reported at once, without mlflow."""

import http.server
import os
import socket
import subprocess
import sys
import threading

import pytest
import requests

from gdpo_tune.core.errors import TrackingError
from gdpo_tune.tracking import check_server
from gdpo_tune.tracking.server import find_problem, make_absolute, set_environment
from tests.support.tracking import make_tiny_spec


@pytest.fixture
def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@pytest.fixture
def server():
    """An HTTP server that answers `status` and keeps the headers of the last request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status = 200
        headers_seen = {}

        def do_GET(self):
            Handler.headers_seen = dict(self.headers)
            exists = self.path.startswith("/api/2.0/mlflow/experiments/search?")
            self.send_response(Handler.status if exists else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        Handler.uri = f"http://127.0.0.1:{httpd.server_port}"
        yield Handler
        httpd.shutdown()
        thread.join()


def test_a_server_that_answers(server):
    assert find_problem(server.uri) == ""
    assert find_problem(server.uri + "/") == ""
    assert "404" in find_problem(server.uri + "/\N{LATIN SMALL LETTER U WITH DIAERESIS}")


def test_a_server_that_refuses(server):
    server.status = 403
    assert find_problem(server.uri) == "it answers 403 Forbidden"
    server.status = 401
    assert "user name and password in MLFLOW_TRACKING_USERNAME" in find_problem(server.uri)


def test_credentials_of_mlflow_are_used(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pass")
    find_problem(server.uri)
    assert server.headers_seen["Authorization"] == "Basic bWU6cGFzcw=="
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    find_problem(server.uri)
    assert server.headers_seen["Authorization"] == "Bearer abc"


def test_credentials_in_the_address_are_used_as_the_client_of_mlflow_does(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "other")
    assert find_problem(server.uri.replace("://", "://me:p%40ss@")) == ""
    sent = requests.Request("GET", server.uri.replace("://", "://me:p%40ss@")).prepare()
    assert server.headers_seen["Authorization"] == sent.headers["Authorization"]
    server.status = 401
    assert "user name and password" in find_problem(server.uri.replace("://", "://me:pass@"))


def test_a_server_that_does_not_answer(free_port):
    assert "does not answer" in find_problem(f"http://127.0.0.1:{free_port}")
    assert "does not answer" in find_problem(f"postgresql://me:pw@127.0.0.1:{free_port}/mlflow")


def test_a_string_that_is_not_an_address():
    assert "not an address" in find_problem("postgresql://host:port/db")


def test_sqlite_files(tmp_path):
    assert find_problem(f"sqlite:///{tmp_path}/new/folder/mlflow.db") == ""
    assert find_problem(f"sqlite:///{tmp_path}") == "it is not a file"
    assert find_problem(f"sqlite:///{tmp_path}/50%.db") == ""
    assert "choose a path without %" in find_problem(f"sqlite:///{tmp_path}/a%20b.db")


def test_a_missing_server_is_a_warning(tmp_path, free_port, capsys):
    check_server(make_tiny_spec(tmp_path, f"tracking.uri=http://127.0.0.1:{free_port}"))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: tracking.uri = http://127.0.0.1")
    assert "every update is kept and sent later" in warning


def test_a_missing_server_that_is_required_is_an_error(tmp_path, free_port):
    uri = f"tracking.uri=http://127.0.0.1:{free_port}"
    with pytest.raises(TrackingError, match="required is true") as raised:
        check_server(make_tiny_spec(tmp_path, uri, "tracking.required=true"))
    assert raised.value.exit_status == 2


def test_a_server_that_is_there_is_not_mentioned(tmp_path, server, capsys):
    check_server(make_tiny_spec(tmp_path, f"tracking.uri={server.uri}", "tracking.required=true"))
    assert capsys.readouterr().err == ""


def test_the_check_imports_neither_mlflow_nor_numpy():
    code = (
        "import sys; from gdpo_tune.tracking import MlflowSink, check_server;"
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


def test_addresses_that_cannot_be_encoded(tmp_path):
    assert "not an address" in find_problem(f"http://{'x' * 70}.example:9")
    assert "not an address" in find_problem(f"postgresql://{'x' * 70}.example:9/db")
    assert "it cannot be opened" in find_problem(f"sqlite:///{'x' * 300}")
