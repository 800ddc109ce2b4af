"""Messages of the spool become MLflow runs, through a client of our own and no global state.

Runs are found by tag before they are created, so no interruption leaves two of them. A run that
the store no longer has (another database, deleted by hand) is written again from what the spool
delivered earlier. mlflow itself is imported in the sending thread, since that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from gdpo_tune.tracking.projection import SWEEP, Identity
from gdpo_tune.tracking.sender import Away, Refused
from gdpo_tune.tracking.server import SQLITE, artifact_location, sqlite_path
from gdpo_tune.tracking.spool import Message

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

T = TypeVar("T")

METRICS_PER_BATCH = 800
ENTRIES_PER_BATCH = 100
"""Of params or tags; MLflow takes 1000 entries of all kinds in one request."""
RUNS_PER_PAGE = 1000
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow 3 opens the experiment on its page for language-model traces."""
REFUSALS = ("INVALID_PARAMETER_VALUE",)
"""Error codes after which the same request would fail again."""


class MlflowWriter:
    """Receives messages and writes them to the experiment at `uri`.

    Args:
        uri: tracking URI; `server.absolute_uri` was applied to it.
        identity: which sweep the runs belong to.
        delivered: what was delivered before, oldest first.
    """

    def __init__(
        self, uri: str, identity: Identity, delivered: Callable[[], Iterable[Message]]
    ) -> None:
        self._uri = uri
        self._identity = identity
        self._delivered = delivered
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._runs: dict[str, str] = {}
        """`SWEEP` or a trial's number -> MLflow's run id."""

    def forget(self) -> None:
        """Look everything up again before the next message."""
        self._client = None
        self._runs = {}

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        """Write the messages, one request a run where possible; return unplaced artifacts."""
        with _translated():
            client = self._client or self._connect()
            for key, group in _by_run(messages).items():
                self._write(client, key, group)
        return [m for m in messages if "artifact" in m and not self._place(client, m)]

    def _connect(self) -> MlflowClient:
        from mlflow import MlflowClient

        path = sqlite_path(self._uri)
        if path is not None and not path.exists():
            create_database(path)
        client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        self._experiment = self._find_experiment(client)
        self._runs = self._find_runs(client)
        lost = [m for m in self._delivered() if m["run"] not in self._runs]
        for key, group in _by_run(lost).items():
            self._write(client, key, group)
        self._client = client
        for message in lost:
            if "artifact" in message:
                self._place(client, message)
        return client

    def _find_experiment(self, client: MlflowClient) -> str:
        name = self._identity.experiment
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            location = artifact_location(self._uri, name)
            return client.create_experiment(name, location, EXPERIMENT_KIND)
        if experiment.lifecycle_stage == "deleted":
            client.restore_experiment(experiment.experiment_id)
        return experiment.experiment_id

    def _find_runs(self, client: MlflowClient) -> dict[str, str]:
        parent = self._find_parent(client)
        if parent is None:
            return {}
        runs = {SWEEP: parent}
        for run in self._search(client, f"tags.`mlflow.parentRunId` = '{parent}'"):
            runs.setdefault(run.data.tags.get("trial", ""), run.info.run_id)
        return runs

    def _find_parent(self, client: MlflowClient) -> str | None:
        identity = self._identity
        query = f"tags.role = '{SWEEP}' AND tags.identity = '{identity.identity}'"
        runs = [r for r in self._search(client, query) if r.data.tags["sweep"] == identity.name]
        for run in runs:
            if run.data.tags["sweep_id"] == identity.sweep_id:
                return run.info.run_id
        return runs[-1].info.run_id if runs and identity.adopt else None

    def _search(self, client: MlflowClient, query: str) -> Iterator[Run]:
        """Runs that match, oldest first."""
        token: str | None = None
        while True:
            page = client.search_runs(
                [self._experiment],
                query,
                max_results=RUNS_PER_PAGE,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def _run_id(self, client: MlflowClient, key: str, message: Message) -> str:
        if key not in self._runs:
            if "name" not in message:
                raise Refused(f"trial {key} has no run: its first message was refused")
            tags = dict(message["tags"])
            if key != SWEEP:
                tags["mlflow.parentRunId"] = self._runs[SWEEP]
            run = client.create_run(
                self._experiment, start_time=message["start"], tags=tags, run_name=message["name"]
            )
            self._runs[key] = run.info.run_id
        return self._runs[key]

    def _write(self, client: MlflowClient, key: str, group: list[Message]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        group = _since_renewal(group)
        if group[0].get("renew") and key in self._runs:
            client.delete_run(self._runs.pop(key))
        run_id = self._run_id(client, key, group[0])
        metrics = [Metric(*entry) for message in group for entry in message.get("metrics", ())]
        params = [Param(*item) for item in _merged(group, "params").items()]
        tags = [RunTag(*item) for item in _merged(group, "tags").items()]
        parts = zip_longest(
            _chunks(metrics, METRICS_PER_BATCH),
            _chunks(params, ENTRIES_PER_BATCH),
            _chunks(tags, ENTRIES_PER_BATCH),
            fillvalue=(),
        )
        for some_metrics, some_params, some_tags in parts:
            client.log_batch(run_id, some_metrics, some_params, some_tags)
        ends = [message for message in group if "status" in message]
        if ends and "end" in ends[-1]:
            client.set_terminated(run_id, ends[-1]["status"], ends[-1]["end"])
        elif ends:
            client.update_run(run_id, ends[-1]["status"])

    def _place(self, client: MlflowClient, message: Message) -> bool:
        """Store one artifact; False if its store does not take it for now."""
        artifact = message["artifact"]
        run_id = self._runs[message["run"]]
        try:
            with _translated():
                if "text" in artifact:
                    client.log_text(run_id, artifact["text"], artifact["name"])
                elif Path(artifact["file"]).exists():
                    client.log_artifact(run_id, artifact["file"])
        except (Away, Refused):
            return False
        return True


def create_database(path: Path) -> None:
    """Make MLflow's tables in a new SQLite file that appears only once it is whole.

    MLflow takes seconds for it, and a file that a kill left in between never opens again.
    """
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        new = Path(folder) / path.name
        uri = f"{SQLITE}{new}"
        MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
        if not path.exists():
            new.replace(path)


@contextmanager
def _translated() -> Generator[None]:
    """Turn what mlflow and its stores raise into `Away` or `Refused`."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        kind = Refused if error.error_code in REFUSALS else Away
        raise kind(_first_line(error)) from error
    except (SQLAlchemyError, CommandError, OSError, ImportError) as error:
        raise Away(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _by_run(messages: Iterable[Message]) -> dict[str, list[Message]]:
    groups: dict[str, list[Message]] = {}
    for message in messages:
        groups.setdefault(message["run"], []).append(message)
    return groups


def _since_renewal(group: list[Message]) -> list[Message]:
    """The messages from the last one that replaces the run."""
    renewals = [i for i, message in enumerate(group) if message.get("renew")]
    return group[renewals[-1] :] if renewals else group


def _merged(messages: Iterable[Message], field: str) -> dict[str, str]:
    merged: dict[str, str] = {}
    for message in messages:
        merged |= message.get(field, {})
    return merged


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
