"""Where MLflow is: does it answer, which file is it, and how its client is kept quick and quiet."""

from __future__ import annotations

import base64
import http.client
import os
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import TrackingError
from gdpo_tune.spec import without_password

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

ANSWER_SECONDS = 1.5
SQLITE = "sqlite:///"
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again, and blocks nobody
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # a batch takes a busy server seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # failures are told once, when the sink is closed
}


CREDENTIALS = (
    "it does not take the user name and password in MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD (401)"
)


def set_environment() -> None:
    """Set what keeps mlflow quick and quiet, where the user has not set it already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_server(spec: SweepSpec) -> None:
    """Warn on stderr if the tracking server of `spec` does not answer, in under two seconds.

    Raises:
        TrackingError: it does not, and `tracking.required` is true.
    """
    problem = find_problem(spec.tracking.uri)
    if not problem:
        return
    uri = without_password(spec.tracking.uri)
    if spec.tracking.required:
        raise TrackingError(
            f"tracking.uri = {uri}: {problem}, and tracking.required is true\n"
            "    fix: start the server, correct the URI, or set tracking.required: false"
        )
    print(
        f"warning: tracking.uri = {uri}: {problem}; everything is kept, and sent once it takes it",
        file=sys.stderr,
    )


def find_problem(uri: str) -> str:
    """Why nothing can be logged to `uri` at the moment; empty if it seems to work.

    A database server is asked for a connection only, and an unknown scheme is not asked at all.
    """
    path = sqlite_path(uri)
    if path is not None:
        return _file_problem(path)
    try:
        parts = urllib.parse.urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"it is not an address ({error})"
    if parts.scheme in ("http", "https"):
        return _http_problem(parts)
    return _port_problem(host, port) if host and port else ""


def _file_problem(path: Path) -> str:
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        return f"it cannot be opened ({error.strerror})"
    if existing == path and not path.is_file():
        return "it is not a file"
    if not os.access(existing, os.W_OK):
        return f"{existing} is not writable"
    read = urllib.parse.unquote(str(path))
    if read != str(path):
        return f"MLflow takes its path for {read}: choose one without %"
    return ""


def _http_problem(address: urllib.parse.SplitResult) -> str:
    # urllib knows no `user:password@`, which the client of mlflow does.
    place = address.netloc.rpartition("@")[2]
    uri = urllib.parse.urlunsplit((address.scheme, place, address.path, "", ""))
    # Not `/health`: a server with users answers that to anybody.
    page = uri.rstrip("/") + "/api/2.0/mlflow/experiments/search?max_results=1"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(page, headers=_authorization(address)), timeout=ANSWER_SECONDS
        ):
            return ""
    except urllib.error.HTTPError as error:
        unknown = error.code == http.HTTPStatus.UNAUTHORIZED
        return CREDENTIALS if unknown else f"it answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer ({getattr(error, 'reason', error)})"
    except ValueError as error:  # a host or a path that cannot be encoded
        return f"it is not an address ({error})"


def _authorization(address: urllib.parse.SplitResult) -> dict[str, str]:
    """The header that mlflow's own client would send: what the address says comes first."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    if address.username:
        user, password = map(urllib.parse.unquote, (address.username, address.password or ""))
    if user:
        credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {credentials}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _port_problem(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except OSError as error:
        return f"it does not answer ({error})"
    return ""


def sqlite_path(uri: str) -> Path | None:
    """The database file that `uri` names, absolute; None for anything but a SQLite file."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def absolute_uri(uri: str) -> str:
    """`uri` with the file of a SQLite database made absolute, so that no `chdir` moves it."""
    path = sqlite_path(uri)
    return uri if path is None else f"{SQLITE}{path}"


def artifact_location(uri: str, experiment: str) -> str | None:
    """Folder for the artifacts of an experiment in a SQLite file: beside the file.

    MLflow's own choice is a folder of the current directory, wherever the database is. A server
    chooses for itself, hence None.
    """
    path = sqlite_path(uri)
    if path is None:
        return None
    folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in experiment)
    return str(path.parent / "mlartifacts" / folder)
