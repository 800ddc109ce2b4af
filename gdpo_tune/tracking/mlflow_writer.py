"""Writes messages of the spool to MLflow, through a client of its own and without global state.

Runs are found by tag before they are created. A server that hangs may still carry out a request
after the same run was requested again: of such duplicates the run with more content stays, and the
others are deleted. A run that the store no longer has (another database, deleted by hand) is
written again from what the spool delivered earlier. mlflow is imported in the sending thread, since
that takes a second.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from gdpo_tune.spec import hide_passwords
from gdpo_tune.tracking import views
from gdpo_tune.tracking.run_content import RUN_NAME, SWEEP, SweepIdentity
from gdpo_tune.tracking.server import CREDENTIALS, SQLITE, find_uri_problem, parse_sqlite_path
from gdpo_tune.tracking.spool import Message, MessageRefused, ServerUnavailable, is_separate

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

METRICS_PER_BATCH = 800
ENTRIES_PER_BATCH = 100
"""Params or tags; MLflow takes 1000 entries of all kinds in one request."""
RUNS_PER_PAGE = 1000
NOTE = "mlflow.note.content"
ARTIFACTS = "mlartifacts"
"""Directory of all artifacts beside a SQLite file."""
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow 3 opens the experiment on its page for traces of language models."""


class MlflowWriter:
    """Receives messages and writes them to the experiment at `uri`, an absolute one.

    `delivered` yields what was delivered before, oldest first.
    """

    def __init__(
        self, uri: str, identity: SweepIdentity, delivered: Callable[[], Iterable[Message]]
    ) -> None:
        self._uri = uri
        self._identity = identity
        self._delivered = delivered
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._runs: dict[str, str] = {}
        """`SWEEP` or a trial's number -> MLflow's run id."""
        self._may_have_duplicates = False
        """True after a failed request, which the server may still carry out."""

    def reset(self) -> None:
        """Look everything up again before the next message."""
        self._client = None
        self._runs = {}
        self._may_have_duplicates = True

    def delete_duplicates(self) -> None:
        """Delete runs that failed requests created a second time."""
        if self._may_have_duplicates and self._client is not None:
            with _translate_errors():
                find_runs(self._client, self._experiment, self._identity)
            self._may_have_duplicates = False

    def get_front_link(self) -> str:
        """Return the address of the view of the front; empty as long as there is none."""
        return self._fill_placeholders(views.build_link()) if SWEEP in self._runs else ""

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        """Write the messages, one request a run if possible; return what cannot be stored yet."""
        with _translate_errors():
            return self._write(self._client or self._connect(), messages)

    def _connect(self) -> MlflowClient:
        client = open_client(self._uri)
        self._experiment = find_experiment(client, self._uri, self._identity.experiment)
        self._runs = find_runs(client, self._experiment, self._identity)
        lost = {m["run"] for m in self._delivered()} - self._runs.keys()
        if lost:  # the registry may name one of them
            restored = [m for m in self._delivered() if m["run"] in lost or "models" in m]
            self._write(client, restored)
        self._client = client
        return client

    def _find_or_create_run(self, client: MlflowClient, message: Message) -> str:
        key = message["run"]
        if key not in self._runs:
            if "name" not in message:
                raise MessageRefused(f"trial {key} has no run: its first message was refused")
            tags = dict(message.get("tags", {}))
            if key != SWEEP:
                tags["mlflow.parentRunId"] = self._runs[SWEEP]
            name, start = tags.get(RUN_NAME, message["name"]), message.get("start")
            run = client.create_run(self._experiment, start, tags=tags, run_name=name)
            self._runs[key] = run.info.run_id
        return self._runs[key]

    def _write(self, client: MlflowClient, messages: Sequence[Message]) -> list[Message]:
        for message in _merge_by_run(messages):
            self._write_run(client, message)
        return [m for m in messages if is_separate(m) and not self._store(client, m)]

    def _write_run(self, client: MlflowClient, message: Message) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

        key, tags = message["run"], message.get("tags", {})
        if message.get("renew") and key in self._runs:
            client.delete_run(self._runs.pop(key))
        run_id = self._find_or_create_run(client, message)
        if key == SWEEP:
            tags = {name: self._fill_placeholders(text) for name, text in tags.items()}
        batches = zip_longest(
            _split([Metric(*point) for point in message.get("metrics", ())], METRICS_PER_BATCH),
            _split([Param(*item) for item in message.get("params", {}).items()], ENTRIES_PER_BATCH),
            _split([RunTag(*item) for item in tags.items()], ENTRIES_PER_BATCH),
            fillvalue=(),
        )
        for batch in batches:
            client.log_batch(run_id, *batch)
        inputs: list[DatasetInput] = []
        for entry in message.get("inputs", ()):
            fields = dict(entry)
            context = InputTag("mlflow.data.context", fields.pop("context"))
            inputs.append(DatasetInput(Dataset(**fields), [context]))
        if inputs:
            client.log_inputs(run_id, inputs)
        self._tag_experiment(client, message.get("experiment", {}))
        if "end" in message:
            client.set_terminated(run_id, message.get("status"), message["end"])
        elif "status" in message:
            client.update_run(run_id, message["status"])

    def _tag_experiment(self, client: MlflowClient, tags: Mapping[str, str]) -> None:
        for name, text in tags.items():
            text = self._fill_placeholders(text)
            if name == NOTE:
                note = client.get_experiment(self._experiment).tags.get(NOTE, "")
                text = views.merge_note(note, text, self._runs[SWEEP])
            client.set_experiment_tag(self._experiment, self._fill_placeholders(name), text)

    def _fill_placeholders(self, text: str) -> str:
        return views.fill_placeholders(text, self._uri, self._experiment, self._runs[SWEEP])

    def _store(self, client: MlflowClient, message: Message) -> bool:
        """Store a file or registered models; return False if their store does not take it now."""
        from gdpo_tune.tracking.front_projection import register_models

        with suppress(ServerUnavailable, MessageRefused), _translate_errors():
            run_id = self._find_or_create_run(client, message)
            artifact = message.get("artifact", {})
            if "models" in message:
                register_models(client, message["models"], self._runs, self._runs[SWEEP])
            elif "text" in artifact:
                client.log_text(run_id, artifact["text"], artifact["name"])
            elif Path(artifact["file"]).exists():
                client.log_artifact(run_id, artifact["file"])
            return True
        return False


def try_store(uri: str, experiment: str, sweep: str) -> None:
    """Write and delete a test run with an artifact; raise as `MlflowWriter.deliver` if that fails.

    MLflow keeps deleted runs, so the next test of the sweep restores that run: there is only one.
    Without an `experiment` nothing is written.
    """
    from mlflow.entities import ViewType
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with _translate_errors():
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
            with _translate_errors(f"{artifacts} takes no artifact: "):
                client.log_text(run_id, "", "test.txt")
                with suppress(NotImplementedError):  # some stores keep what they have
                    get_artifact_repository(artifacts, tracking_uri=uri).delete_artifacts()
        finally:
            client.delete_run(run_id)


def open_client(uri: str) -> MlflowClient:
    """Return a client of the store at `uri`; a SQLite file that is missing is created.

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


def find_runs(client: MlflowClient, experiment: str, identity: SweepIdentity) -> dict[str, str]:
    """Return `SWEEP` or a trial's number -> id of its run; duplicates are deleted."""
    query = f"tags.role = '{SWEEP}' AND tags.identity = '{identity.identity}'"
    candidates = _search_runs(client, experiment, query)
    sweeps = [run for run in candidates if run.data.tags["sweep"] == identity.name]
    ours = [run for run in sweeps if run.data.tags["sweep_id"] == identity.sweep_id]
    if not ours and identity.adopt:
        ours = sweeps[-1:]
    if not ours:
        return {}
    parent = _delete_all_but_one(client, ours)
    trials: dict[str, list[Run]] = {}
    for run in _search_runs(client, experiment, f"tags.`mlflow.parentRunId` = '{parent}'"):
        # People may nest other runs under a sweep's: those have no such tag, and stay.
        if "trial" in run.data.tags:
            trials.setdefault(run.data.tags["trial"], []).append(run)
    return {SWEEP: parent} | {
        trial: _delete_all_but_one(client, runs) for trial, runs in trials.items()
    }


def _delete_all_but_one(client: MlflowClient, duplicates: Iterable[Run]) -> str:
    parts = ("metrics", "params", "tags")
    kept, *others = sorted(
        duplicates,
        key=lambda run: (-sum(len(getattr(run.data, part)) for part in parts), run.info.run_id),
    )
    for run in others:
        client.delete_run(run.info.run_id)
    return kept.info.run_id


def _search_runs(client: MlflowClient, experiment: str, query: str) -> Iterator[Run]:
    order, token = ["attributes.start_time ASC"], None
    while token != "":
        page = client.search_runs(
            [experiment], query, max_results=RUNS_PER_PAGE, order_by=order, page_token=token
        )
        yield from page
        token = page.token or ""


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


@contextmanager
def _translate_errors(place: str = "") -> Generator[None]:
    """Turn errors of mlflow and its stores into `ServerUnavailable` or `MessageRefused`."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (ServerUnavailable, MessageRefused):
        raise
    except Exception as error:  # libraries of databases and object stores have their own errors
        code = error.error_code if isinstance(error, MlflowException) else ""
        kind = MessageRefused if code == "INVALID_PARAMETER_VALUE" else ServerUnavailable
        cause = hide_passwords(str(error)).rpartition("(Caused by ")[2].strip()
        line = f"{type(error).__name__}: {cause[:300]}".splitlines()[0]
        raise kind(place + (CREDENTIALS if code == "UNAUTHENTICATED" else line)) from error


def _merge_by_run(messages: Iterable[Message]) -> list[Message]:
    """Merge the messages of each run, files aside; one that replaces the run drops earlier ones."""
    merged: dict[str, Message] = {}
    for message in messages:
        key = message["run"]
        if key not in merged or message.get("renew"):
            merged[key] = {"run": key}
        run = cast("dict[str, Any]", merged[key])
        if "status" in message:
            run.pop("end", None)
        for field, content in message.items():
            if isinstance(content, dict):
                run.setdefault(field, {}).update(content)
            elif isinstance(content, list):
                run.setdefault(field, []).extend(content)
            else:
                run[field] = content
    return list(merged.values())


def _split(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
