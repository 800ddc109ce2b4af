"""The listener that keeps MLflow in step with a sweep, in a thread that never delays the sweep."""

from __future__ import annotations

import hashlib
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gdpo_tune.core import events
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.results.public_record import PublicFilter
from gdpo_tune.spec import dump_public_yaml, hide_passwords
from gdpo_tune.tracking import run_content, views
from gdpo_tune.tracking.mlflow_writer import MlflowWriter
from gdpo_tune.tracking.run_content import SWEEP, SweepIdentity, convert_to_milliseconds
from gdpo_tune.tracking.server import check_server, make_absolute, set_environment
from gdpo_tune.tracking.spool import (
    BATCH_BYTES,
    Message,
    MessageRefused,
    ServerUnavailable,
    Spool,
    SpooledRun,
    is_separate,
)

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_projection import FrontWatch

SPOOL = "spool.jsonl"
CLOSING_SECONDS = 10.0
INTERVAL = 5.0
"""Seconds between two batches: many small updates of a trial become one request."""
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
CLOSING_DELAY = 0.5
"""Seconds between attempts while the process waits to end."""
LEFTOVER = "some files or registered models could not be stored, everything else is there"
CRASHED = "the sending thread crashed, see its traceback"
PATIENCE = 10.0
"""Seconds after which `sync` gives up on a server that takes nothing."""
POLL_SECONDS = 0.5
PRINT_SECONDS = 5.0


class MlflowSink:
    """Projects a sweep into MLflow: a run for the sweep, a nested run per trial, and the front.

    Events become messages that hold only what is new. They are put on a spool, and a thread sends
    them. `SweepStarted` compares the records of the ledger with what earlier processes spooled, so
    a crash between the ledger and the spool loses nothing.

    Nothing is opened before `SweepStarted`: only the holder of the ledger may write the spool.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._public = PublicFilter(spec) if spec.tracking.private else None
        self._shown = self._public.spec if self._public else spec
        self._inputs = run_content.build_inputs(self._shown)
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
                now, spent = self._read_increasing_clock(), event.measurement.cost.seconds
                taken = [*event.earlier, event.measurement]
                ages = (convert_to_milliseconds(spent - each.cost.seconds) for each in taken)
                self._add_curves(event.number, zip(taken, (now - age for age in ages), strict=True))
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
        """Attach `front.png`, and a report that is not private, to the sweep's run if new."""
        from gdpo_tune.results.summary import FRONT_FILE, REPORT_FILE

        # A report quotes reasons and incidents.
        names = [FRONT_FILE] if self._public else [REPORT_FILE, FRONT_FILE]
        for path in (self._directory / name for name in names):
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
        self._add(run_content.build_sweep_message(identity, self._shown, views.build_link()))
        tags = views.build_experiment_tags(self._shown, spool.runs[SWEEP].start)
        self._add({"run": SWEEP, "experiment": tags})
        spec = {"name": "spec.yaml", "text": dump_public_yaml(self._shown)}
        self._add({"run": SWEEP, "artifact": spec})
        for record in records:
            # A trial that is spooled as ended has nothing new in its file: most need no reading.
            state = spool.runs.get(str(record.number), SpooledRun()).tags.get("state")
            self._update_trial(record)
            if record.is_open or record.state != state:
                self._add_missing_curves(record)
        self._front = FrontWatch(self._shown)
        self._front.is_stale = bool(records)
        self._writer = MlflowWriter(self._uri, identity, spool.read_delivered)
        self._sender = Sender(spool, self._writer)
        self._sender.start()

    def _finish(self, records: Sequence[TrialRecord], status: str) -> None:
        """Give every run its last state; a trial that still runs ends here."""
        for record in records:
            if record.state == "running":
                self._add_missing_curves(record)
                end = self._read_increasing_clock()
                self._add({"run": str(record.number), "status": "KILLED", "end": end})
            else:
                self._update_trial(record)
        self._update_front(ended=True, wait=True)
        for message in self._final if status == "FINISHED" else ():
            self._add(message)
        self._add({"run": SWEEP, "status": status, "end": self._read_increasing_clock()})

    def _update_trial(self, record: TrialRecord) -> None:
        if self._public:
            places = {"directory": None, "checkpoint": None, "address": ""}
            record = replace(self._public.select_trial(record), **places)
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
        if self._spool is None:
            return
        steps = self._spool.runs[str(number)].steps
        points = run_content.build_curve_points(measurements, self._spec.training, steps)
        if self._public:
            points = [point for point in points if self._public.select({point[0]: 0})]
        if points:
            self._spool.put({"run": str(number), "metrics": points})

    def _update_front(self, *, ended: bool = False, wait: bool = False) -> None:
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


class Sender:
    """Delivers `spool` through `writer` in a daemon thread; pauses grow while delivery fails."""

    def __init__(self, spool: Spool, writer: MlflowWriter, interval: float = INTERVAL) -> None:
        self._spool = spool
        self._writer = writer
        self._interval = interval
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._refusals = 0
        """Refused batches in a row."""
        self._connected = False
        self._catching_up = False
        self._complete = False
        """True once everything is delivered and duplicates are deleted."""
        self.problem = ""
        """Why the last attempt failed; empty if it did not."""
        self.refused = 0
        """Number of messages that the server refused for good."""
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def get_state(self) -> events.TrackingState:
        """Return how far delivery is, without disk access."""
        problem = self.problem or self._find_crash() or (LEFTOVER if self._spool.leftover else "")
        kind = "away" if problem else "catching up" if self._catching_up else "up to date"
        return events.TrackingState(kind, self._spool.count_pending(), problem)

    def close(self, timeout: float) -> int:
        """Deliver for at most `timeout` seconds more and return how many messages are left."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout)
        self.problem = self.problem or self._find_crash()
        return self._spool.count_pending()

    def _find_crash(self) -> str:
        ended = self._thread.ident is not None and not self._thread.is_alive()
        in_time = time.monotonic() <= self._deadline
        return CRASHED if ended and in_time and not self._spool.is_drained() else ""

    def _run(self) -> None:
        delay, tried = FIRST_DELAY, False
        while not (self._closing.is_set() and self._spool.is_drained() and tried):
            try:
                more = self._send_batch()
            except (ServerUnavailable, MessageRefused) as error:
                self.problem = str(error)
                self._catching_up = True
                self._writer.reset()
                self._pause(delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                self.problem = ""
                self._catching_up = more or (self._catching_up and not self._spool.is_drained())
                delay = FIRST_DELAY
                self._pause(0 if more else self._interval)
            tried = self._complete or bool(self.problem)
            if time.monotonic() > self._deadline:
                return

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds) and (self.problem or self._spool.leftover):
            time.sleep(CLOSING_DELAY)

    def _send_batch(self) -> bool:
        """Deliver one batch; return whether it was a full one, so that more may wait."""
        messages, offset = self._spool.read_batch()
        more = offset - self._spool.offset >= BATCH_BYTES
        # Retrying the leftover with every batch would slow down the others.
        retry = self._closing.is_set() or any(is_separate(message) for message in messages)
        waiting = [] if retry else self._spool.leftover
        left = self._deliver([*self._spool.leftover, *messages] if retry else messages)
        self._spool.commit(offset, [*waiting, *left])
        if self._closing.is_set() and self._spool.is_drained():
            self._writer.delete_duplicates()
            self._complete = True
        return more

    def _deliver(self, messages: list[Message]) -> list[Message]:
        """Deliver `messages` and return those that are left; set refused ones aside.

        A batch is refused only the second time in a row: the first refusal may come from stale
        knowledge of the server, which `reset` clears.
        """
        # The first delivery happens even without messages: the writer restores what was lost.
        if not messages and self._connected:
            return []
        try:
            left = self._writer.deliver(messages)
        except MessageRefused:
            self._refusals += 1
            if self._refusals < 2:
                raise
            left = []
            for message in messages:
                try:
                    left += self._writer.deliver([message])
                except MessageRefused as error:
                    self._spool.set_aside(message, str(error))
                    self.refused += 1
        self._refusals = 0
        self._connected = True
        return left


def sync(spec: SweepSpec) -> int:
    """Bring MLflow up to date with the ledger, the metric files and the figures of a sweep.

    It sends what the spool still holds, and writes again what MLflow lost, even a whole database.
    The result is the exit status: 1 if something is left; stderr has the reason.

    Raises:
        LedgerHeldError: the sweep runs, and sends by itself.
        TrackingError: `tracking.required`, and the server does not answer.
    """
    from gdpo_tune.ledger import Ledger  # slow to import

    check_server(spec)
    with Ledger.open(spec) as ledger:
        records, sessions = tuple(ledger.get_records()), ledger.get_sessions()
        sink = MlflowSink(spec)
        sink(events.SweepStarted(records, len(records)))
        finished = bool(sessions and sessions[-1].get("ending"))
        sink(events.SweepFinished(records, interrupted=not finished))
        sink.log_figures()
        wait_until_sent(sink)
        warning = sink.close()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
        return 1
    print("MLflow: up to date")
    return 0


def wait_until_sent(sink: MlflowSink) -> None:
    """Wait until everything is sent, or the server has taken nothing for `PATIENCE` seconds."""
    least, progressed, printed = sys.maxsize, time.monotonic(), time.monotonic()
    while (state := sink.get_state()) is not None and state.pending:
        now = time.monotonic()
        if state.pending < least:
            least, progressed = state.pending, now
        if state.kind == "away" and now - progressed > PATIENCE:
            return
        if now - printed > PRINT_SECONDS:
            # A sender that keeps up calls itself up to date while its last batch is on its way.
            left = f"MLflow: {state.pending:,} updates left"
            print(state if state.kind == "away" else left, flush=True)
            printed = now
        time.sleep(POLL_SECONDS)
