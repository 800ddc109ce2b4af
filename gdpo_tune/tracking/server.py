"""The MLflow server or database at a URI: its problems, its file, and settings of the client."""

from __future__ import annotations

import os
import sys
import urllib.parse
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import TrackingError
from gdpo_tune.core.http import run_with_timeout
from gdpo_tune.spec import hide_passwords
from gdpo_tune.spec.model import TRACKING_VARIABLES
from gdpo_tune.tracking.spool import MessageRefused, ServerUnavailable

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

SERVER_SECONDS, DATABASE_SECONDS = 20.0, 60.0
"""Longest time of a test run; in a new database MLflow first creates its tables."""
SQLITE = "sqlite:///"
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again, and delays nothing
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # a batch takes a busy server seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # failures are reported once, when the sink is closed
}
CREDENTIALS = "it rejects MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD or _TOKEN (401)"


def set_environment() -> None:
    """Set the variables that keep mlflow quick and quiet, unless the user has set them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_server(spec: SweepSpec) -> None:
    """Let MLflow's client write and delete a test run; warn on stderr if that fails.

    Raises:
        TrackingError: it fails, and `tracking.required` is true.
    """
    tracking, create = spec.tracking, spec.tracking.required
    problem = find_problem(tracking.uri, tracking.experiment, spec.name, create=create)
    origin = tracking.origins.get("uri", "default")
    text = f"tracking.uri = {hide_passwords(tracking.uri)} ({origin}): {problem}"
    if problem and tracking.required:
        raise TrackingError(
            f"{text}, and tracking.required is true\n"
            "    fix: mend that, name another server or file, or set tracking.required: false"
        )
    if problem:
        print(f"warning: {text}; every update is kept and sent later", file=sys.stderr)


def find_problem(uri: str, experiment: str = "", sweep: str = "", *, create: bool = False) -> str:
    """Return why MLflow's client can do nothing at `uri`, within a minute; empty if it can.

    With an `experiment`, it writes and deletes a test run of `sweep`. A SQLite file that does not
    exist yet is asked only if it may be created.
    """
    from gdpo_tune.tracking.mlflow_writer import try_store

    problem, path, uri = find_uri_problem(uri), parse_sqlite_path(uri), make_absolute(uri)
    if problem or (path is not None and not path.exists() and not create):
        return problem
    set_environment()
    import_module("mlflow")  # it takes seconds, which are not those of the server
    seconds = SERVER_SECONDS if uri.startswith("http") else DATABASE_SECONDS
    try:
        run_with_timeout(seconds, lambda: try_store(uri, experiment, sweep))
    except (TimeoutError, ServerUnavailable, MessageRefused) as error:
        return str(error)
    return ""


def find_uri_problem(uri: str) -> str:
    """Return why nothing can ever be logged to `uri`, without calling it; empty if it may work."""
    path = parse_sqlite_path(uri)
    if path is None:
        if "#" in uri and uri.startswith("http"):
            return f"a browser's page: write {hide_passwords(uri).partition('#')[0].rstrip('/')}"
        variable = TRACKING_VARIABLES["uri"]
        return f"its password is in no file: export {variable} with it" if ":***@" in uri else ""
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        return f"it cannot be opened ({error.strerror})"
    # MLflow makes a URL of the path, and in a new database a literal of the current directory.
    quotes = existing != path and {*"'\""} <= {*os.getcwd()}
    if quotes or "?" in str(path) or urllib.parse.unquote(str(path)) != str(path):
        return f"MLflow misreads ?, %20 or both quotes in {path}: rename it, or name another file"
    if existing == path and not path.is_file():
        return "it is not a file"
    return "" if os.access(existing, os.W_OK) else f"{existing} is not writable"


def parse_sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of the SQLite file at `uri`; None for anything else."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def make_absolute(uri: str) -> str:
    """Return `uri` with an absolute path of a SQLite file, so that no `chdir` moves it."""
    path = parse_sqlite_path(uri)
    return uri if path is None else f"{SQLITE}{path}"
