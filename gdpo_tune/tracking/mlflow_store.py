"""The runs of one sweep in MLflow: what they hold, and how what they lack is written.

Runs are found by tag, and what they hold is read once, when a connection begins. Every write has a
key, so that it may be repeated: the number of a trial, the name of a tag or parameter, the name and
step of a point. Only creating a run is not safe to repeat, because a server that hangs may still
carry out the first request: of such duplicates the run with more content stays. A run that a person
deleted or renamed stays so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.tracking import views
from gdpo_tune.tracking.run_content import KNEE, NOTE, PARENT, RUN_NAME, SWEEP, RunContent
from gdpo_tune.tracking.server import (
    ContentRefused,
    find_experiment,
    make_absolute,
    open_client,
    translate_errors,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

    from gdpo_tune.spec import SweepSpec

METRICS_PER_BATCH, ENTRIES_PER_BATCH = 1000, 100
"""Points, and params or tags, that MLflow takes in one request."""
DIGESTS = "mlflow.gdpo_tune.files"
"""Tag with the digest of each file that a run has, as JSON; MLflow's page hides such tags."""


@dataclass
class HeldRun:
    """Content that MLflow has of a run."""

    id: str
    start: int
    status: str
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, tuple[float, int]]  # value and step of the last point
    has_inputs: bool = False
    is_deleted: bool = False

    @classmethod
    def read(cls, run: Run) -> HeldRun:
        """Convert an answer of MLflow."""
        metrics = {m.key: (m.value, m.step) for m in run.data.to_proto().metrics}
        info, data = run.info, run.data
        has_inputs = bool(run.inputs and run.inputs.dataset_inputs)
        known = info.run_id, info.start_time, info.status, data.tags, data.params, metrics
        return cls(*known, has_inputs, info.lifecycle_stage == "deleted")

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.tags) + len(self.params) + len(self.metrics)


class MlflowStore:
    """The experiment and the runs of a sweep.

    Every method raises `ServerUnavailable` or `ContentRefused`; after either call `reset`.
    """

    def __init__(self, spec: SweepSpec, sweep_id: str) -> None:
        self._uri = make_absolute(spec.tracking.uri)
        self._experiment_name = spec.tracking.experiment
        self._tags = {
            "sweep": spec.name,
            "identity": spec.compute_identity(),
            "sweep_id": sweep_id,  # random, of the ledger
            "role": SWEEP,
        }
        """Tags by which the sweep's run is found."""
        self._client: MlflowClient | None = None
        self._experiment = ""
        self.runs: dict[str, HeldRun] = {}
        """`SWEEP` or a trial's number -> its run."""
        self.site: views.Site | None = None
        """Where the sweep's run is; None before the first connection."""

    @property
    def client(self) -> MlflowClient:
        """Client of the current connection."""
        assert self._client is not None, "connect comes first"
        return self._client

    def reset(self) -> None:
        """Read again what MLflow holds before the next request."""
        self._client = None

    def connect(self) -> views.Site | None:
        """Read what MLflow holds, and create the sweep's run; None if that was done before."""
        if self._client is not None:
            return None
        with translate_errors():
            client = open_client(self._uri)
            self._experiment = find_experiment(client, self._uri, self._experiment_name)
            self.runs = self._find_runs(client)
            if SWEEP not in self.runs:
                name = self._tags["sweep"]
                run = client.create_run(self._experiment, tags=self._tags, run_name=name)
                self.runs[SWEEP] = HeldRun.read(run)
            self.site = views.Site(self._uri, self._experiment, self.runs[SWEEP].id)
            self._client = client
        return self.site

    def _find_runs(self, client: MlflowClient) -> dict[str, HeldRun]:
        """Return `SWEEP` or a trial's number -> its run; duplicates are deleted."""

        def keep_one(runs: Iterable[HeldRun]) -> HeldRun:
            kept, *others = sorted(runs, key=lambda run: (run.is_deleted, -run.size, run.id))
            for run in others:
                if not run.is_deleted:
                    client.delete_run(run.id)
            return kept

        query = f"tags.role = '{SWEEP}' AND tags.identity = '{self._tags['identity']}'"
        found = _search(client, self._experiment, query)
        ours = [run for run in found if self._tags.items() <= run.tags.items()]
        if not ours:
            return {}
        runs = {SWEEP: keep_one(ours)}
        trials: dict[str, list[HeldRun]] = {}
        for run in _search(client, self._experiment, f"tags.`{PARENT}` = '{runs[SWEEP].id}'"):
            if "trial" in run.tags:  # people may nest other runs under a sweep's: those stay
                trials.setdefault(run.tags["trial"], []).append(run)
        return runs | {trial: keep_one(found) for trial, found in trials.items()}

    def delete_duplicates(self) -> None:
        """Delete runs that failed requests created a second time."""
        with translate_errors():
            self._find_runs(self.client)

    def write(self, key: str, content: RunContent) -> None:
        """Write what a run lacks of its content, files aside; its tags after all points.

        An entry that the server refuses is left out, and raises `ContentRefused` at the end.
        """
        from mlflow.entities import Metric, Param, RunTag

        run = self._get_run(key, content)
        if run.is_deleted:
            return
        held = {name: step for name, (_, step) in run.metrics.items()}
        points = [point for point in content.curves if point[3] > held.get(point[0], -1)]
        for name, (value, when) in content.values.items():
            if name not in run.metrics or run.metrics[name][0] != value:
                points.append((name, value, when, 0))
        params = {k: v for k, v in content.params.items() if k not in run.params}
        tags = {k: v for k, v in content.tags.items() if run.tags.get(k, "") != v}
        if run.tags.get(RUN_NAME, content.name).removesuffix(KNEE) != content.name:
            tags.pop(RUN_NAME, None)
        refused: dict[str, None] = {}

        def send(kind: str, entries: list[Any], size: int) -> None:
            for start in range(0, len(entries), size):
                batch = entries[start : start + size]
                named: Any = {kind: batch}
                try:
                    with translate_errors():
                        self.client.log_batch(run.id, **named)
                except ContentRefused as error:
                    if len(batch) > 1:
                        send(kind, batch, (len(batch) + 1) // 2)
                    else:
                        refused[f"{batch[0].key}: {error}"] = None
                    continue
                for each in batch:
                    value = (each.value, each.step) if kind == "metrics" else each.value
                    getattr(run, kind)[each.key] = value

        send("metrics", [Metric(*point) for point in points], METRICS_PER_BATCH)
        send("params", [Param(*item) for item in params.items()], ENTRIES_PER_BATCH)
        send("tags", [RunTag(*item) for item in tags.items()], ENTRIES_PER_BATCH)
        with translate_errors():
            if content.inputs and not run.has_inputs:
                self.client.log_inputs(run.id, build_dataset_inputs(content.inputs))
            if content.status and content.status != run.status:
                if content.end is None:
                    self.client.update_run(run.id, content.status)
                else:
                    self.client.set_terminated(run.id, content.status, content.end)
        run.has_inputs |= bool(content.inputs)
        run.status = content.status or run.status
        if refused:
            raise ContentRefused("; ".join(refused))

    def _get_run(self, key: str, content: RunContent) -> HeldRun:
        """Return a run; create that of a trial if it is missing.

        A run with other parameters is replaced: the ledger lost it in a crash, and gave its number
        again.
        """
        run = self.runs.get(key)
        if run and key == SWEEP:
            return run
        with translate_errors():
            if run and any(content.params.get(k, v) != v for k, v in run.params.items()):
                if not run.is_deleted:
                    self.client.delete_run(self.runs.pop(key).id)
                run = None
            if run is None:
                # Without its state: that says that all points are there, see `write`.
                tags = {name: content.tags[name] for name in ("sweep", "trial", "role")}
                tags[PARENT], name = self.runs[SWEEP].id, content.tags.get(RUN_NAME, content.name)
                created = self.client.create_run(self._experiment, content.start, tags, name)
                run = self.runs[key] = HeldRun.read(created)
            return run

    def write_files(self, key: str, files: Mapping[str, str | Path]) -> None:
        """Store the files that a run lacks; one that does not exist is left out."""
        run = self.runs[key]
        if run.is_deleted:
            return
        digests: dict[str, str] = json.loads(run.tags.get(DIGESTS, "{}"))
        for name, content in files.items():
            if isinstance(content, Path) and not content.exists():
                continue
            data = content.read_bytes() if isinstance(content, Path) else content.encode()
            digest = hashlib.sha256(data).hexdigest()[:16]
            if digests.get(name) == digest:
                continue
            with translate_errors():
                if isinstance(content, Path):
                    self.client.log_artifact(run.id, str(content))
                else:
                    self.client.log_text(run.id, content, name)
                digests[name] = digest
                run.tags[DIGESTS] = json.dumps(digests)
                self.client.set_tag(run.id, DIGESTS, run.tags[DIGESTS])

    def tag_experiment(self, tags: Mapping[str, str]) -> None:
        """Set tags of the experiment; of its note, only the line of this sweep.

        A server of MLflow 2 takes at most 5,000 characters, which views exceed; others are set.
        """
        refused: dict[str, None] = {}
        with translate_errors():
            held = self.client.get_experiment(self._experiment).tags
        for name, text in tags.items():
            if name == NOTE:
                text = views.merge_note(held.get(NOTE, ""), text, self.runs[SWEEP].id)
            if held.get(name) == text:
                continue
            try:
                with translate_errors():
                    self.client.set_experiment_tag(self._experiment, name, text)
            except ContentRefused as error:
                refused[str(error)] = None
        if refused:
            raise ContentRefused("; ".join(refused))

    def register(self, versions: Iterable[Mapping[str, Any]]) -> None:
        """Make the registry hold these versions and no others of this sweep."""
        from gdpo_tune.tracking.front_content import register_versions

        with translate_errors():
            ids = {key: run.id for key, run in self.runs.items()}
            register_versions(self.client, self._tags["sweep"], versions, ids)


def build_dataset_inputs(entries: Iterable[Mapping[str, str]]) -> list[DatasetInput]:
    """Convert the entries of `run_content.build_inputs`."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs: list[DatasetInput] = []
    for entry in entries:
        fields = {name: text for name, text in entry.items() if name != "context"}
        context = InputTag("mlflow.data.context", entry["context"])
        inputs.append(DatasetInput(Dataset(**fields), [context]))
    return inputs


def _search(client: MlflowClient, experiment: str, query: str) -> Iterator[HeldRun]:
    from mlflow.entities import ViewType

    order, token = ["attributes.start_time ASC"], None
    while token != "":
        page = client.search_runs([experiment], query, ViewType.ALL, 1000, order, token)
        yield from map(HeldRun.read, page)
        token = page.token or ""
