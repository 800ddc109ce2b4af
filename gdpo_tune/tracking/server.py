"""The MLflow server or database at a URI: its problems, its file, and settings of the client."""

from __future__ import annotations

import os
import socket
import sys
import urllib.parse
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import TrackingError
from gdpo_tune.spec import hide_passwords

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

ANSWER_SECONDS = 1.5
SQLITE = "sqlite:///"
PAGE = "/api/2.0/mlflow/experiments/search"
"""Not `/health`: a server with users answers that without credentials."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again, and delays nothing
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # a batch takes a busy server seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # failures are reported once, when the sink is closed
}
CREDENTIALS = (
    "it rejects the user name and password in MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD (401)"
)


def set_environment() -> None:
    """Set the variables that keep mlflow quick and quiet, unless the user has set them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_server(spec: SweepSpec) -> None:
    """Warn on stderr if the tracking server of `spec` does not answer, in under two seconds.

    Raises:
        TrackingError: it does not answer, and `tracking.required` is true.
    """
    problem = find_problem(spec.tracking.uri)
    if not problem:
        return
    uri = hide_passwords(spec.tracking.uri)
    if spec.tracking.required:
        raise TrackingError(
            f"tracking.uri = {uri}: {problem}, and tracking.required is true\n"
            "    fix: start the server, correct the URI, or set tracking.required: false"
        )
    print(
        f"warning: tracking.uri = {uri}: {problem}; every update is kept and sent later",
        file=sys.stderr,
    )


def find_problem(uri: str) -> str:
    """Return why nothing can be logged to `uri` now; empty if it seems to work.

    Of a database server only the connection is tried. An unknown scheme is not tried at all.
    """
    path = parse_sqlite_path(uri)
    if path is not None:
        return _find_file_problem(path)
    try:
        address = urllib.parse.urlsplit(uri)
        if address.scheme in ("http", "https"):
            return _find_http_problem(address)
        if address.hostname and address.port:
            socket.create_connection((address.hostname, address.port), ANSWER_SECONDS).close()
    except ValueError as error:  # also a host or a path that cannot be encoded
        return f"it is not an address ({error})"
    except OSError as error:
        return f"it does not answer ({error})"
    return ""


def _find_file_problem(path: Path) -> str:
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        return f"it cannot be opened ({error.strerror})"
    if existing == path and not path.is_file():
        return "it is not a file"
    if not os.access(existing, os.W_OK):
        return f"{existing} is not writable"
    decoded = urllib.parse.unquote(str(path))
    if decoded != str(path):
        return f"MLflow reads this path as {decoded}: choose a path without %"
    return ""


def _find_http_problem(address: urllib.parse.SplitResult) -> str:
    import httpx  # a tenth of a second that a database does not need

    path = address.path.rstrip("/") + PAGE
    url = address._replace(path=path, query="max_results=1", fragment="").geturl()
    # As in the client of mlflow: credentials in the address come first, then a user, then a token.
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    auth = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None
    try:
        answer = httpx.get(
            url,
            auth=None if address.username else auth,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=ANSWER_SECONDS,
            follow_redirects=True,
        )
    except httpx.InvalidURL as error:
        return f"it is not an address ({error})"
    except httpx.HTTPError as error:
        return f"it does not answer ({error})"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return CREDENTIALS
    return "" if answer.is_success else f"it answers {answer.status_code} {answer.reason_phrase}"


def parse_sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of the SQLite file at `uri`; None for anything else."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def make_absolute(uri: str) -> str:
    """Return `uri` with an absolute path of a SQLite file, so that no `chdir` moves it."""
    path = parse_sqlite_path(uri)
    return uri if path is None else f"{SQLITE}{path}"
