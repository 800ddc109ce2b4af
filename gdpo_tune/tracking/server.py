"""The MLflow server or database at a URI: its problems, a client of it, and its experiments.

mlflow is imported where it is used, since that takes seconds.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import urllib.parse
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gdpo_tune.core.errors import TrackingError
from gdpo_tune.core.http import run_with_timeout
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.spec.model import TRACKING_VARIABLES

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from gdpo_tune.spec import SweepSpec

SERVER_SECONDS, DATABASE_SECONDS = 20.0, 60.0
"""Longest time of a test run; in a new database MLflow first creates its tables."""
SQLITE = "sqlite:///"
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracking thread tries again, and delays nothing
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # a batch takes a busy server seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # failures are reported once, when the tracker is closed
}
CREDENTIALS = "it rejects MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD or _TOKEN (401)"
ARTIFACTS = "mlartifacts"
"""Directory of all artifacts beside a SQLite file."""
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow 3 opens the experiment on its page for traces of language models."""


class ServerUnavailable(Exception):
    """The server cannot take anything now; the same request may succeed later."""


class ContentRefused(Exception):
    """The server refuses a request, and would refuse it again."""


def check_server(spec: SweepSpec) -> None:
    """Let MLflow's client write and delete a test run; warn on stderr if that fails.

    Raises:
        TrackingError: it fails, and `tracking.required` is true.
    """
    tracking, create = spec.tracking, spec.tracking.required
    problem = find_problem(tracking.uri, tracking.experiment, spec.name, create=create)
    origin = tracking.origins.get("uri", "default")
    text = f"tracking.uri = {redact_passwords(tracking.uri)} ({origin}): {problem}"
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
    problem, path, uri = find_uri_problem(uri), parse_sqlite_path(uri), make_absolute(uri)
    if problem or (path is not None and not path.exists() and not create):
        return problem
    set_environment()
    import_module("mlflow")  # it takes seconds, which are not those of the server
    seconds = SERVER_SECONDS if uri.startswith("http") else DATABASE_SECONDS
    try:
        run_with_timeout(seconds, lambda: try_store(uri, experiment, sweep))
    except (TimeoutError, ServerUnavailable, ContentRefused) as error:
        return str(error)
    return ""


def find_uri_problem(uri: str) -> str:
    """Return why nothing can ever be logged to `uri`, without calling it; empty if it may work."""
    path = parse_sqlite_path(uri)
    if path is None:
        if "#" in uri and uri.startswith("http"):
            return f"a browser's page: write {redact_passwords(uri).partition('#')[0].rstrip('/')}"
        if uri.startswith("file:") or not re.match(r"[\w+]+://|databricks", uri):
            return "a directory, and runs are kept in a database: write sqlite:///mlflow.db"
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


def try_store(uri: str, experiment: str, sweep: str) -> None:
    """Write and delete a test run with an artifact; without an `experiment` write nothing.

    MLflow keeps deleted runs, so the next test of the sweep restores that run: there is only one.

    Raises:
        ServerUnavailable, ContentRefused: it fails.
    """
    from mlflow.entities import ViewType
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with translate_errors():
        client = open_client(uri)
        if not experiment:
            client.search_experiments(max_results=1)
            return
        place, tags = find_experiment(client, uri, experiment), {"role": "test", "sweep": sweep}
        query = " AND ".join(f"tags.{name} = '{text}'" for name, text in tags.items())
        runs = client.search_runs([place], query, ViewType.ALL, max_results=1)
        run = runs[0] if runs else client.create_run(place, tags=tags, run_name="test")
        run_id, artifacts = run.info.run_id, str(run.info.artifact_uri)
        if run.info.lifecycle_stage == "deleted":
            client.restore_run(run_id)
        try:
            with translate_errors(f"{artifacts} takes no artifact: "):
                client.log_text(run_id, "", "test.txt")
                with suppress(NotImplementedError):  # some stores keep what they have
                    get_artifact_repository(artifacts, tracking_uri=uri).delete_artifacts()
        finally:
            client.delete_run(run_id)


def open_client(uri: str) -> MlflowClient:
    """Return a client of the store at `uri`, without global state; create a missing SQLite file.

    Raises:
        ServerUnavailable: MLflow misreads the path, or another MLflow wrote the database. A client
            migrates one that lacks tables, and after that the other MLflow cannot open it.
    """
    import mlflow
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import create_sqlalchemy_engine

    path = parse_sqlite_path(uri)
    if problem := find_uri_problem(uri):
        raise ServerUnavailable(problem)
    if path is not None and not path.exists():
        create_database(path)
    if not uri.startswith(("http", "databricks")):
        engine = create_sqlalchemy_engine(uri)
        with engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
        engine.dispose()
        scripts = Path(mlflow.__file__).with_name("store") / "db_migrations"
        expected = ScriptDirectory(str(scripts)).get_current_head()
        if found not in (None, expected):
            raise ServerUnavailable(
                f"its schema is {found}, MLflow {mlflow.__version__} needs {expected}: copy it, "
                "then mlflow db upgrade URI; if a newer MLflow wrote it, install that version"
            )
    return mlflow.MlflowClient(uri, uri)


def create_database(path: Path) -> None:
    """Create MLflow's tables in a new SQLite file, which appears only once it is complete.

    MLflow takes seconds for them, and a file that a kill leaves in between never opens again.
    """
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as directory:
        new = Path(directory) / path.name
        uri = f"{SQLITE}{new}"
        MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
        if not path.exists():
            new.replace(path)


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the id of the experiment, which is created, or restored if it was deleted.

    Artifacts of an experiment in a SQLite file lie beside the file, wherever it is now; MLflow
    itself would put them into the current directory. A server chooses for itself.
    """
    experiment, path = client.get_experiment_by_name(name), parse_sqlite_path(uri)
    if experiment is None:
        # Letters have up to four bytes, and names on a disk up to 255.
        directory = re.sub(r"[^\w.-]", "_", name).lstrip(".")[:60]
        location = path and str(path.parent / ARTIFACTS / directory)
        return client.create_experiment(name, location, EXPERIMENT_KIND)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    if path is not None:
        _follow_database(path, Path(str(experiment.artifact_location)))
    return experiment.experiment_id


def _follow_database(path: Path, old: Path) -> None:
    """Record that artifacts moved from the directory `old` along with the SQLite file at `path`.

    MLflow records absolute paths, and its client cannot change them.
    """
    new, former = path.parent / ARTIFACTS / old.name, old.parent.parent
    if old.parent.name != ARTIFACTS or former.resolve() == path.parent.resolve():
        return
    with closing(sqlite3.connect(path)) as database, database:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            database.execute(
                f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) "
                f"WHERE substr({column} || '/', 1, length(:old) + 1) = :old || '/'",
                {"old": str(old), "new": str(new)},
            )
    lost = "" if new.exists() or not old.exists() else f"; copy what is still in {old}"
    print(f"MLflow: artifacts are in {new}, since the database has moved{lost}", file=sys.stderr)


@contextmanager
def translate_errors(place: str = "") -> Generator[None]:
    """Turn errors of mlflow and its stores into `ServerUnavailable` or `ContentRefused`."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (ServerUnavailable, ContentRefused):
        raise
    except Exception as error:  # libraries of databases and object stores have their own errors
        code = error.error_code if isinstance(error, MlflowException) else ""
        kind = ContentRefused if code == "INVALID_PARAMETER_VALUE" else ServerUnavailable
        cause = redact_passwords(str(error)).rpartition("(Caused by ")[2].strip()
        line = f"{type(error).__name__}: {cause[:300]}".splitlines()[0]
        raise kind(place + (CREDENTIALS if code == "UNAUTHENTICATED" else line)) from error


def set_environment() -> None:
    """Set the variables that keep mlflow quick and quiet, unless the user has set them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def parse_sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of the SQLite file at `uri`; None for anything else."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def make_absolute(uri: str) -> str:
    """Return `uri` with an absolute path of a SQLite file, so that no `chdir` moves it."""
    path = parse_sqlite_path(uri)
    return uri if path is None else f"{SQLITE}{path}"
