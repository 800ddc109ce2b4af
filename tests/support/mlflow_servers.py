"""MLflow and PostgreSQL servers that are killed, hang, fail or run out of space."""

import http.server
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support import tracking_driver
from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT

DRIVER = Path(tracking_driver.__file__)
PATIENCE = 240.0


class MlflowServer:
    """One server at one address; it may be started again after it was killed."""

    def __init__(self, directory: Path, store: str, *options: str, **environment: str) -> None:
        self.port = find_free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._process: subprocess.Popen | None = None
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store),
            *("--artifacts-destination", str(directory / "served"), "--workers", "1"),
            *("--host", "127.0.0.1", "--port", str(self.port), *options),
        ]
        self._environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **environment,
        }

    def start(self) -> None:
        with (self._directory / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for_server(f"{self.uri}/health")

    def kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            psutil.wait_procs(children, PATIENCE)  # they hold the address until they end
        self._process.wait()

    @contextmanager
    def keep_killed(self) -> Iterator[None]:
        self.kill()
        yield
        self.start()

    @contextmanager
    def keep_hung(self) -> Iterator[None]:
        """Accept connections without an answer; answer all requests afterwards."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        yield
        os.killpg(self._process.pid, signal.SIGCONT)

    @contextmanager
    def keep_failing(self) -> Iterator[None]:
        """Answer every request with 500."""
        self.kill()
        with http.server.ThreadingHTTPServer(("127.0.0.1", self.port), _ErrorHandler) as stub:
            thread = threading.Thread(target=stub.serve_forever, args=(0.05,))
            thread.start()
            yield
            stub.shutdown()
            thread.join()
        self.start()

    @contextmanager
    def keep_full(self, database: Path) -> Iterator[None]:
        """Let no file of the server grow beyond the size of the database now."""
        main = psutil.Process(self._process.pid)
        processes = [main, *main.children(recursive=True)]
        size = database.stat().st_size
        for process in processes:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        yield
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        for process in processes:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)


class _ErrorHandler(http.server.BaseHTTPRequestHandler):
    def _fail(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(500)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _fail

    def log_message(self, *_: object) -> None:
        pass


def wait_for_server(url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def start_driver(
    directory: Path, uri: str, pause: float, timeout: float = 120.0, **environment: str
) -> subprocess.Popen:
    """Start a sweep without training in its own process, which prints a line for each trial."""
    return subprocess.Popen(
        [sys.executable, str(DRIVER), str(directory), uri, str(pause), str(timeout)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class PostgresServer:
    """A PostgreSQL server for MLflow.

    If this process is root, it runs as the user of PostgreSQL, which refuses root.
    """

    def __init__(self, directory: Path) -> None:
        self._data, port = directory / "postgres", find_free_port()
        self._data.mkdir()
        self._user = {}
        if os.geteuid() == 0:
            self._user = {"user": "postgres", "group": "postgres"}
            shutil.chown(self._data, **self._user)
            directory.chmod(0o711)
        self._run("initdb", "-D", str(self._data), "-U", "me", "-A", "trust", "-N")
        self._options = (
            f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._data} -F"
        )
        self.uri = f"postgresql+psycopg2://me@127.0.0.1:{port}/postgres"

    def start(self) -> None:
        self._control("-o", self._options, "start")

    def stop(self) -> None:
        self._control("-m", "immediate", "stop")

    def _control(self, *words: str) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._data / "log"), "-w", *words)

    def _run(self, *command: str) -> None:
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, cwd=self._data, stdout=quiet, **self._user)


@contextmanager
def run_postgres() -> Iterator[str]:
    """Run a server and give its URI; skip the test if this machine has no PostgreSQL.

    It does not use a directory of pytest, because each run of pytest closes those to other users.
    """
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("no PostgreSQL on this machine")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        server = PostgresServer(Path(directory))
        server.start()
        try:
            yield server.uri
        finally:
            server.stop()
