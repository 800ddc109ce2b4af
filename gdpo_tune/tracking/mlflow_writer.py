"""Messages of the spool become MLflow runs, through a client of our own and no global state.

No interruption leaves two runs of a trial, see `mlflow_runs`. A run that the store no longer has
(another database, deleted by hand) is written again from what the spool delivered earlier. mlflow
itself is imported in the sending thread, since that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from gdpo_tune.tracking import views
from gdpo_tune.tracking.datasets import Input
from gdpo_tune.tracking.mlflow_runs import find_experiment, find_runs
from gdpo_tune.tracking.run_content import SWEEP, Identity, is_apart
from gdpo_tune.tracking.sender import Away, Refused
from gdpo_tune.tracking.server import CREDENTIALS, SQLITE, sqlite_path
from gdpo_tune.tracking.spool import Message

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

T = TypeVar("T")

METRICS_PER_BATCH = 800
ENTRIES_PER_BATCH = 100
"""Of params or tags; MLflow takes 1000 entries of all kinds in one request."""
REFUSALS = ("INVALID_PARAMETER_VALUE",)
"""Error codes after which the same request would fail again."""
UNKNOWN_USER = "UNAUTHENTICATED"
NOTE = "mlflow.note.content"
CONTEXT = "mlflow.data.context"


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
        self._doubtful = False
        """Whether a request failed that the server may yet carry out."""

    def forget(self) -> None:
        """Look everything up again before the next message."""
        self._client = None
        self._runs = {}
        self._doubtful = True

    def settle(self) -> None:
        """Delete what requests that nobody waited for have made a second time."""
        if self._doubtful and self._client is not None:
            with _translated():
                find_runs(self._client, self._experiment, self._identity)
            self._doubtful = False

    def link(self) -> str:
        """Address of the view that shows the front; empty as long as there is none."""
        return self._resolved(views.link()) if SWEEP in self._runs else ""

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        """Write the messages, one request a run where possible; return what has no place yet."""
        with _translated():
            client = self._client or self._connect()
            for key, group in _by_run(messages).items():
                self._write(client, key, group)
        return [m for m in messages if is_apart(m) and not self._place(client, m)]

    def _connect(self) -> MlflowClient:
        from mlflow import MlflowClient

        path = sqlite_path(self._uri)
        if path is not None and not path.exists():
            create_database(path)
        client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        self._experiment = find_experiment(client, self._uri, self._identity.experiment)
        self._runs = find_runs(client, self._experiment, self._identity)
        lost = {m["run"] for m in self._delivered()} - self._runs.keys()
        if lost:
            for key, group in _by_run(m for m in self._delivered() if m["run"] in lost).items():
                self._write(client, key, group)
            for message in self._delivered():
                # The registry may have named a run that was lost.
                if is_apart(message) and (message["run"] in lost or "models" in message):
                    self._place(client, message)
        self._client = client
        return client

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
        told = _merged(group, "tags")
        if key == SWEEP:
            told = {name: self._resolved(text) for name, text in told.items()}
        tags = [RunTag(*item) for item in told.items()]
        parts = zip_longest(
            _chunks(metrics, METRICS_PER_BATCH),
            _chunks(params, ENTRIES_PER_BATCH),
            _chunks(tags, ENTRIES_PER_BATCH),
            fillvalue=(),
        )
        for some_metrics, some_params, some_tags in parts:
            client.log_batch(run_id, some_metrics, some_params, some_tags)
        if inputs := [entry for message in group for entry in message.get("inputs", ())]:
            client.log_inputs(run_id, [_dataset(entry) for entry in inputs])
        self._tag_experiment(client, _merged(group, "experiment"))
        ends = [message for message in group if "status" in message]
        if ends and "end" in ends[-1]:
            client.set_terminated(run_id, ends[-1]["status"], ends[-1]["end"])
        elif ends:
            client.update_run(run_id, ends[-1]["status"])

    def _tag_experiment(self, client: MlflowClient, tags: Mapping[str, str]) -> None:
        """Set tags of the experiment; of its note, only the line of this sweep."""
        for name, text in tags.items():
            text = self._resolved(text)
            if name == NOTE:
                known = client.get_experiment(self._experiment).tags.get(NOTE, "")
                text = views.noted(known, text, self._runs[SWEEP])
            client.set_experiment_tag(self._experiment, self._resolved(name), text)

    def _resolved(self, text: str) -> str:
        return views.resolved(
            text,
            server=views.server_address(self._uri),
            experiment=self._experiment,
            parent=self._runs[SWEEP],
        )

    def _place(self, client: MlflowClient, message: Message) -> bool:
        """Store what lies apart from runs; False if its store does not take it for now."""
        from gdpo_tune.tracking.model_registry import register

        try:
            with _translated():
                if "models" in message:
                    register(client, message["models"], self._runs, self._runs[SWEEP])
                else:
                    _store(client, self._run_id(client, message["run"], message), message)
        except (Away, Refused):
            return False
        return True


def _store(client: MlflowClient, run_id: str, message: Message) -> None:
    artifact = message["artifact"]
    if "text" in artifact:
        client.log_text(run_id, artifact["text"], artifact["name"])
    elif Path(artifact["file"]).exists():
        client.log_artifact(run_id, artifact["file"])


def _dataset(entry: Input) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    about = {name: text for name, text in entry.items() if name != "context"}
    return DatasetInput(Dataset(**about), [InputTag(CONTEXT, entry["context"])])


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
        if error.error_code == UNKNOWN_USER:
            raise Away(CREDENTIALS) from error
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
