"""The listener that keeps MLflow in step with a sweep, without ever delaying the sweep."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gdpo_tune.core import events
from gdpo_tune.core.steps import read_steps
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.spec import dump_public_yaml, hide_passwords
from gdpo_tune.tracking import run_content, views
from gdpo_tune.tracking.mlflow_writer import MlflowWriter
from gdpo_tune.tracking.run_content import SWEEP, SweepIdentity, convert_to_milliseconds
from gdpo_tune.tracking.sender import Sender
from gdpo_tune.tracking.server import make_absolute, set_environment
from gdpo_tune.tracking.spool import Message, Spool, SpooledRun

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_projection import FrontWatch

SPOOL = "spool.jsonl"
FIGURES = ("report.html", "front.png")
CLOSING_SECONDS = 10.0


class MlflowSink:
    """Projects a sweep into MLflow: a run for the sweep, a nested run per trial, and the front.

    Events become messages that hold only what is new. They are put on a spool, and a thread sends
    them. `SweepStarted` compares the records of the ledger with what earlier processes spooled, so
    a crash between the ledger and the spool loses nothing.

    Nothing is opened before `SweepStarted`: only the holder of the ledger may write the spool.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._inputs = run_content.build_inputs(spec)
        self._directory = spec.directory.absolute()
        self._uri = make_absolute(spec.tracking.uri)
        self._records: dict[int, TrialRecord] = {}
        self._spool: Spool | None = None
        self._sender: Sender | None = None
        self._writer: MlflowWriter | None = None
        self._time = 0
        self._front: FrontWatch | None = None
        self._final: list[Message] = []
        """Content of the latest front for the end of the sweep."""

    def __enter__(self) -> MlflowSink:
        return self

    def __exit__(self, *_: object) -> None:
        warning = self.close(CLOSING_SECONDS)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)

    def __call__(self, event: events.Event) -> None:
        """Put the news of an event on the spool, and compute the front now and then."""
        match event:
            case events.SweepStarted():
                self._open(event.records)
            case events.SearchStarted() | events.IncidentOccurred() | events.SweepSteered():
                pass  # the ledger has it; MLflow shows trials
            case events.TrialProgress():
                self._add_curves(event.number, _add_times(event, self._read_increasing_clock()))
            case events.TrialStarted() | events.TrialPaused() | events.TrialFinished():
                if isinstance(event, events.TrialStarted):
                    # Not sooner: a finished sweep starts nothing, and its run keeps its state.
                    self._add({"run": SWEEP, "status": "RUNNING"})
                elif event.record.state == "failed":
                    self._add_missing_curves(event.record)  # it never sent what it held back
                self._update_trial(event.record)
            case events.SweepFinished():
                self._finish(event.records, "KILLED" if event.interrupted else "FINISHED")
        self._update_front(ended=isinstance(event, events.TrialFinished))

    def log_figures(self) -> None:
        """Attach `report.html` and `front.png` to the sweep's run if they are new."""
        for path in (self._directory / name for name in FIGURES):
            if self._spool is not None and path.exists():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                self._add({"run": SWEEP, "artifact": {"file": str(path), "sha256": digest}})

    def get_state(self) -> events.TrackingState | None:
        """Return how far MLflow is; None before the sweep has started and after `close`."""
        return self._sender and self._sender.get_state()

    def get_front_link(self) -> str:
        """Return the address of the front in MLflow, relative for a database; may be empty."""
        return self._writer.get_front_link() if self._writer else ""

    def close(self, timeout: float = CLOSING_SECONDS) -> str:
        """Send what is left, for at most `timeout` seconds; return a warning for the user.

        It says how much is left or was refused, and what happens to it; empty if all was sent.
        """
        if self._spool is None or self._sender is None or self._front is None:
            return ""
        # A run without a status is one that MLflow has just created, and shows as running.
        if self._spool.runs[SWEEP].status in ("", "RUNNING"):
            self._finish(list(self._records.values()), "FAILED")
        self._front.close()
        left = self._sender.close(timeout)
        self._spool.close()
        uri = hide_passwords(self._spec.tracking.uri)
        warnings: list[str] = []
        if left:
            warnings.append(
                f"{left} updates did not reach {uri} ({self._sender.problem or 'out of time'}); "
                f"they are kept in {self._spool.path} and sent the next time the same command "
                "runs, or by\n"
                f"  python -m gdpo_tune.report {shlex.quote(self._spec.location)} --sync"
            )
        if self._sender.refused:
            warnings.append(
                f"{uri} refused {self._sender.refused} updates; they are in "
                f"{self._spool.refused_path}"
            )
        self._spool = self._sender = self._front = None
        return "; ".join(warnings)

    def _open(self, records: Sequence[TrialRecord]) -> None:
        # Numpy takes a while, and a server that does not answer must be reported before that.
        from gdpo_tune.tracking.front_projection import FrontWatch

        set_environment()
        experiment = self._spec.tracking.experiment or self._spec.name
        path, destination = self._directory / SPOOL, f"{self._uri}#{experiment}"
        spool = Spool(path, destination)
        first = spool.runs.get("0")
        started = records[0].started if records else None
        if first and (started is None or first.start != convert_to_milliseconds(started)):
            spool.move_aside()  # it belongs to another ledger, which this one replaced
            spool = Spool(path, destination)
        self._spool, sweep = spool, spool.runs.get(SWEEP, SpooledRun())
        identity = SweepIdentity(
            name=self._spec.name,
            identity=self._spec.compute_identity(),
            experiment=experiment,
            sweep_id=sweep.tags.get("sweep_id") or uuid.uuid4().hex,
            adopt=not sweep.start and bool(records),
        )
        self._add(run_content.build_sweep_message(identity, self._spec, views.build_link()))
        tags = views.build_experiment_tags(self._spec, spool.runs[SWEEP].start)
        self._add({"run": SWEEP, "experiment": tags})
        spec = {"name": "spec.yaml", "text": dump_public_yaml(self._spec)}
        self._add({"run": SWEEP, "artifact": spec})
        for record in records:
            # A trial that is spooled as ended has nothing new in its file: most need no reading.
            state = spool.runs.get(str(record.number), SpooledRun()).tags.get("state")
            self._update_trial(record)
            if record.is_open or record.state != state:
                self._add_missing_curves(record)
        self._front = FrontWatch(self._spec)
        self._front.is_stale = bool(records)
        self._writer = MlflowWriter(self._uri, identity, spool.read_delivered)
        self._sender = Sender(spool, self._writer)
        self._sender.start()

    def _finish(self, records: Sequence[TrialRecord], status: str) -> None:
        """Give every run its last state; a trial that still runs ends here."""
        for record in records:
            if record.state == "running":
                self._add_missing_curves(record)
                self._add(
                    {
                        "run": str(record.number),
                        "status": "KILLED",
                        "end": self._read_increasing_clock(),
                    }
                )
            else:
                self._update_trial(record)
        self._update_front(ended=True, wait=True)
        for message in self._final if status == "FINISHED" else ():
            self._add(message)
        self._add({"run": SWEEP, "status": status, "end": self._read_increasing_clock()})

    def _update_trial(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        content = run_content.build_trial_message(record, self._spec.name, self._inputs)
        run = self._spool and self._spool.runs.get(content["run"])
        self._add(content, renew=bool(run) and run.params != content.get("params"))

    def _add_missing_curves(self, record: TrialRecord) -> None:
        """Add step metrics that a trial wrote to its file and that are not on the spool."""
        directory, started = record.directory, record.started
        if directory is not None and started is not None:
            steps = read_steps(directory)
            times = (convert_to_milliseconds(started + step.cost.seconds) for step in steps)
            self._add_curves(record.number, zip(steps, times, strict=True))

    def _add_curves(self, number: int, measurements: Iterator[tuple[Measurement, int]]) -> None:
        """Add step metrics in one message, except those that were spooled before a restart."""
        if self._spool is None:
            return
        steps = self._spool.runs[str(number)].steps
        points = run_content.build_curve_points(measurements, self._spec.training, steps)
        if points:
            self._spool.put({"run": str(number), "metrics": points})

    def _update_front(self, *, ended: bool = False, wait: bool = False) -> None:
        """Add new fronts; compute the front of all records if `wait`, else now and then."""
        if self._front is None:
            return
        self._front.is_stale |= ended
        for front in self._front.poll(self._records, wait=wait):
            self._final = front.final
            for message in (*front.trials.values(), *front.sweep):
                self._add(message)

    def _add(self, content: Message, *, renew: bool = False) -> None:
        if self._spool is not None:
            self._spool.put_new(content, self._read_increasing_clock(), renew=renew)

    def _read_increasing_clock(self) -> int:
        """Return milliseconds since 1970, always increasing: MLflow's latest value is by time."""
        self._time = max(convert_to_milliseconds(time.time()), self._time + 1)
        return self._time


def _add_times(progress: events.TrialProgress, now: int) -> Iterator[tuple[Measurement, int]]:
    """Yield what a trial has just reported, by step, with the times of measurement in ms."""
    spent = progress.measurement.cost.seconds
    for earlier in progress.earlier:
        yield earlier, now - convert_to_milliseconds(spent - earlier.cost.seconds)
    yield progress.measurement, now
