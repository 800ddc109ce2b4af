"""Writes messages of the spool to MLflow, through a client of its own and without global state.

Runs are found by tag before they are created. A server that hangs may still carry out a request
after the same run was requested again: of such duplicates the run with more content stays, and the
others are deleted. A run that the store no longer has (another database, deleted by hand) is
written again from what the spool delivered earlier. mlflow is imported in the sending thread, since
that takes a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from gdpo_tune.tracking import views
from gdpo_tune.tracking.run_content import RUN_NAME, SWEEP, SweepIdentity
from gdpo_tune.tracking.server import CREDENTIALS, SQLITE, parse_sqlite_path
from gdpo_tune.tracking.spool import Message, MessageRefused, ServerUnavailable, is_separate

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

METRICS_PER_BATCH = 800
ENTRIES_PER_BATCH = 100
"""Params or tags; MLflow takes 1000 entries of all kinds in one request."""
RUNS_PER_PAGE = 1000
NOTE = "mlflow.note.content"
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
        from mlflow import MlflowClient

        path = parse_sqlite_path(self._uri)
        if path is not None and not path.exists():
            create_database(path)
        client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
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
            name = tags.get(RUN_NAME, message["name"])
            start = message.get("start")
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
        """Set tags of the experiment; of its note, only the line of this sweep."""
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
        from gdpo_tune.tracking.model_versions import register_models

        with suppress(ServerUnavailable, MessageRefused), _translate_errors():
            if "models" in message:
                register_models(client, message["models"], self._runs, self._runs[SWEEP])
                return True
            artifact = message.get("artifact", {})
            run_id = self._find_or_create_run(client, message)
            if "text" in artifact:
                client.log_text(run_id, artifact["text"], artifact["name"])
            elif Path(artifact["file"]).exists():
                client.log_artifact(run_id, artifact["file"])
            return True
        return False


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the id of the experiment, which is created, or restored if it was deleted.

    Artifacts of an experiment in a SQLite file lie beside the file; MLflow itself would put them
    into the current directory. A server chooses for itself.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        path, directory = parse_sqlite_path(uri), re.sub(r"[^\w.-]", "_", name)
        location = path and str(path.parent / "mlartifacts" / directory)
        return client.create_experiment(name, location, EXPERIMENT_KIND)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


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
    """Return the id of the run with most content; the others are deleted."""

    def order(run: Run) -> tuple[int, str]:
        data = run.data
        return -len(data.metrics) - len(data.params) - len(data.tags), run.info.run_id

    kept, *others = sorted(duplicates, key=order)
    for run in others:
        client.delete_run(run.info.run_id)
    return kept.info.run_id


def _search_runs(client: MlflowClient, experiment: str, query: str) -> Iterator[Run]:
    """Yield the runs that match, oldest first."""
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
def _translate_errors() -> Generator[None]:
    """Turn errors of mlflow and its stores into `ServerUnavailable` or `MessageRefused`."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError) as error:
        code = error.error_code if isinstance(error, MlflowException) else ""
        kind = MessageRefused if code == "INVALID_PARAMETER_VALUE" else ServerUnavailable
        line = f"{type(error).__name__}: {str(error).strip()[:300]}".splitlines()[0]
        raise kind(CREDENTIALS if code == "UNAUTHENTICATED" else line) from error


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
