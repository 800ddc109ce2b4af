"""The listener that keeps MLflow in step with a sweep, without ever making it wait."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from gdpo_tune.core.events import (
    Disturbed,
    Event,
    SearchStarted,
    SweepFinished,
    SweepStarted,
    TrackingState,
    TrialFinished,
    TrialPaused,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.steps import read_steps
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.spec import shown_yaml, without_password
from gdpo_tune.tracking import run_content
from gdpo_tune.tracking.curves import curve_points, dated
from gdpo_tune.tracking.datasets import dataset_inputs
from gdpo_tune.tracking.front_watch import FrontWatch
from gdpo_tune.tracking.mlflow_writer import MlflowWriter
from gdpo_tune.tracking.model_registry import FOLDER
from gdpo_tune.tracking.run_content import SWEEP, Content, Identity, Known, milliseconds
from gdpo_tune.tracking.sender import Sender
from gdpo_tune.tracking.server import absolute_uri, set_environment
from gdpo_tune.tracking.spool import Message, Spool
from gdpo_tune.tracking.sweep_run import experiment_content, sweep_content

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_projection import FrontContent

SPOOL = "spool.jsonl"
"""A trial's own record of its step metrics, in its folder."""
PICTURES = ("report.html", "front.png")
CLOSING_SECONDS = 10.0


class MlflowSink:
    """Projects a sweep into MLflow: a parent run, one child a trial, the front on top.

    Events are turned into messages that say only what is new, and put on a spool; a thread sends
    them. What earlier processes said is read back from the spool, so a crash between the ledger
    and here is made up for by `SweepStarted`, whose records are compared with it.

    Nothing is opened before `SweepStarted`: only the holder of the ledger may write the spool.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._objectives = spec.objective_list()
        self._directory = spec.directory.absolute()
        self._uri = absolute_uri(spec.tracking.uri)
        self._records: dict[int, TrialRecord] = {}
        self._known: dict[str, Known] = {}
        self._spool: Spool | None = None
        self._sender: Sender | None = None
        self._writer: MlflowWriter | None = None
        self._time = 0
        self._front: FrontWatch | None = None
        self._front_stale = False
        self._final: FrontContent | None = None  # as it was last told

    def __enter__(self) -> MlflowSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        warning = self.close(CLOSING_SECONDS)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)

    def __call__(self, event: Event) -> None:
        """Take in an event of the sweep: a line on the spool, and now and then the front."""
        match event:
            case SweepStarted():
                self._open(event.records)
            case SearchStarted() | Disturbed():
                pass  # the ledger has it; MLflow shows trials
            case TrialStarted():
                # Not sooner: a sweep that was finished has nothing to start, and stays as it is.
                self._say(SWEEP, Content(status="RUNNING"))
                self._update_trial(event.record)
            case TrialProgress():
                self._add_points(event.number, dated(event, self._now()))
            case TrialPaused():
                self._update_trial(event.record)
            case TrialFinished():
                if event.record.state == "failed":
                    self._catch_up(event.record)  # what it held back, it never sent
                self._update_trial(event.record)
                self._front_stale = True
            case SweepFinished():
                self._finish(event.records, "KILLED" if event.interrupted else "FINISHED")
        self._watch_front()

    def log_pictures(self) -> None:
        """Attach `report.html` and `front.png` to the parent run, as far as they are new."""
        if self._spool is None:
            return
        for name in PICTURES:
            path = self._directory / name
            if not path.exists():
                continue
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if self._known[SWEEP].files.get(str(path)) != digest:
                self._put({"run": SWEEP, "artifact": {"file": str(path), "sha256": digest}})

    def state(self) -> TrackingState | None:
        """How far MLflow is; None before the sweep has started and once this is closed."""
        return self._sender and self._sender.state()

    def link(self) -> str:
        """Address of the front in MLflow, without a server's for a database; empty if unknown."""
        return self._writer.link() if self._writer else ""

    def close(self, timeout: float = CLOSING_SECONDS) -> str:
        """Send what is left, for at most `timeout` seconds.

        Returns:
            What a person should know: how much is left or was refused, and what becomes of it.
            Empty if all is well.
        """
        if self._spool is None or self._sender is None:
            return ""
        # A run without a status is one that MLflow has just made, and shows as running.
        if self._known[SWEEP].status in ("", "RUNNING"):
            self._finish(list(self._records.values()), "FAILED")
        if self._front is not None:
            self._front.close()
        left = self._sender.close(timeout)
        self._spool.close()
        uri = without_password(self._spec.tracking.uri)
        warnings: list[str] = []
        if left:
            warnings.append(
                f"{left} updates did not reach {uri} "
                f"({self._sender.problem or 'there was no time'}); they are kept in "
                f"{self._spool.path} and sent the next time the same command runs, or by\n"
                f"  python -m gdpo_tune.report {shlex.quote(self._spec.place)} --sync"
            )
        if self._sender.refused:
            warnings.append(
                f"{uri} refused {self._sender.refused} updates; they are in "
                f"{self._spool.refused_path}"
            )
        self._spool = self._sender = self._front = None
        return "; ".join(warnings)

    def _open(self, records: Sequence[TrialRecord]) -> None:
        set_environment()
        experiment = self._spec.tracking.experiment or self._spec.name
        path = self._directory / SPOOL
        spool = Spool(path, f"{self._uri}#{experiment}")
        self._known = _read_back(spool)
        if not run_content.is_ours(self._known, records):
            spool.move_aside()
            spool, self._known = Spool(path, f"{self._uri}#{experiment}"), {}
        self._spool = spool
        about = self._known.setdefault(SWEEP, Known())
        identity = Identity(
            name=self._spec.name,
            identity=self._spec.identity(),
            experiment=experiment,
            sweep_id=about.tags.get("sweep_id") or uuid.uuid4().hex,
            adopt=about.is_empty() and bool(records),
        )
        self._say_sweep(identity)
        for record in records:
            # The file of one that was told to have ended holds nothing new: most need no reading.
            new = self._known.get(str(record.number), Known()).tags.get("state") != record.state
            self._update_trial(record)
            if new or record.is_open:
                self._catch_up(record)
        self._front = FrontWatch(self._spec)
        self._front_stale = bool(records)
        self._writer = MlflowWriter(self._uri, identity, spool.delivered)
        self._sender = Sender(spool, self._writer)
        self._sender.start()

    def _say_sweep(self, identity: Identity) -> None:
        self._say(SWEEP, sweep_content(self._spec, identity))
        self._say(SWEEP, experiment_content(self._spec, self._known[SWEEP].start or 0))
        self._say_text(SWEEP, "spec.yaml", shown_yaml(self._spec))

    def _update_trial(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        content = run_content.trial_content(
            record, self._spec.name, self._objectives, dataset_inputs(self._spec)
        )
        known = self._known.get(str(record.number), Known())
        renew = not known.is_empty() and known.params != content.params
        self._say(str(record.number), content, renew=renew)

    def _catch_up(self, record: TrialRecord) -> None:
        """Say the step metrics that a trial wrote down and an earlier process did not pass on."""
        if record.directory is None or record.started is None:
            return
        began = record.started
        taken = ((m, milliseconds(began + m.cost.seconds)) for m in read_steps(record.directory))
        self._add_points(record.number, taken)

    def _add_points(self, number: int, taken: Iterable[tuple[Measurement, int]]) -> None:
        """Say step metrics in one message, but for steps that were told before a restart."""
        told = self._known[str(number)].curve_step()
        if points := curve_points(taken, told, self._spec.training):
            self._put({"run": str(number), "metrics": points})

    def _finish(self, records: Sequence[TrialRecord], status: str) -> None:
        """Give every run its last state; whatever still runs is stopped here."""
        for record in records:
            if record.state == "running":
                self._catch_up(record)
                self._say(str(record.number), Content(status="KILLED", end=self._now()))
            else:
                self._update_trial(record)
        self._front_stale = True
        self._watch_front(wait=True)
        if status == "FINISHED" and self._final is not None:
            self._register(self._final)
        self._say(SWEEP, Content(status=status, end=self._now()))

    def _register(self, front: FrontContent) -> None:
        """Tell the registry the final front, as far as that is new."""
        for number, text in front.policies.items():
            self._say_text(str(number), f"{FOLDER}/README.md", text)
        if self._known[SWEEP].models != front.models:
            self._put({"run": SWEEP, "models": front.models})

    def _watch_front(self, *, wait: bool = False) -> None:
        """Say what moved on the front, of all that is known if `wait`; compute it when due."""
        if self._front is None:
            return
        self._say_front(self._front.take(wait=wait))
        if self._front_stale and (wait or self._front.is_due()):
            self._front.begin([self._records[number] for number in sorted(self._records)])
            self._front_stale = False
            self._say_front(self._front.take(wait=wait))

    def _say_front(self, front: FrontContent | None) -> None:
        """Say what moved: tags, ranks, size, hypervolume, table, note."""
        if front is None:
            return
        self._final = front
        for number, content in front.trials.items():
            self._say(str(number), content)
        told = self._known[SWEEP].steps.get("hypervolume", -1)
        points = [point for point in front.hypervolume if point[3] > told]
        if points:
            self._put({"run": SWEEP, "metrics": points})
        self._say(SWEEP, front.sweep)
        self._say_text(SWEEP, "front.csv", front.table)

    def _say(self, key: str, content: Content, *, renew: bool = False) -> None:
        """Put a message that holds what was not said about the run before."""
        if renew:
            self._known[key] = Known()
        message = self._known.setdefault(key, Known()).lacks(content, self._now())
        if renew:
            message["renew"] = True
        if message:
            self._put({"run": key, **message})

    def _say_text(self, key: str, name: str, text: str) -> None:
        if self._known[key].texts.get(name) != text:
            self._put({"run": key, "artifact": {"name": name, "text": text}})

    def _put(self, message: Message) -> None:
        if self._spool is not None:
            self._spool.put(message)
            self._known[message["run"]].learn(message)

    def _now(self) -> int:
        """Milliseconds since 1970, strictly increasing: MLflow's latest value is by time."""
        self._time = max(milliseconds(time.time()), self._time + 1)
        return self._time


def _read_back(spool: Spool) -> dict[str, Known]:
    """What earlier processes said about each run."""
    known: dict[str, Known] = {}
    for message in spool.messages():
        if message.get("renew"):
            known[message["run"]] = Known()
        known.setdefault(message["run"], Known()).learn(message)
    return known
