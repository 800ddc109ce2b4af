"""The listener that keeps MLflow in step with a sweep, without ever delaying the sweep.

The driver only puts events on a queue. One thread folds them into what MLflow should show, reads
once what it does show, and writes the difference. The ledger and the trials' files hold everything,
so the next start, or `sync`, sends what is missing.

Everything is stored exactly once, because
- of a step that a trial repeats, the first line of its file counts,
- the time of a point comes from that file, so a request that is repeated changes nothing,
- the tag `state` is written after all points, so a trial that MLflow shows as ended lacks none,
- runs are found by the random id of their ledger.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.events import Event, SweepFinished, SweepStarted, TrackingState
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tracking.mlflow_store import MlflowStore, SweepIdentity
from gdpo_tune.tracking.projection import Projection
from gdpo_tune.tracking.run_content import SWEEP
from gdpo_tune.tracking.server import (
    ContentRefused,
    ServerUnavailable,
    check_server,
    make_absolute,
    set_environment,
)
from gdpo_tune.tracking.views import build_experiment_tags

INTERVAL = 5.0
"""Seconds between two comparisons: many small updates of a trial become one request."""
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
CLOSING_DELAY = 0.5
"""Seconds between attempts while the process waits to end."""
CLOSING_SECONDS = 10.0
LEFTOVER = "some files or registered models could not be stored, everything else is there"
PATIENCE = 10.0
"""Seconds after which `sync` gives up on a server that takes nothing."""
POLL_SECONDS, PRINT_SECONDS = 0.5, 5.0


class MlflowTracker:
    """Projects a sweep into MLflow: a run for the sweep, a nested run per trial, and the front.

    Use it as a context manager. Nothing is opened before `SweepStarted`.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._projection = Projection(spec)
        self._store: MlflowStore | None = None
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._wake, self._is_closing = threading.Event(), False
        self._deadline = float("inf")
        self._problem = ""
        """Why the last attempt failed; empty if it did not."""
        self._is_clean = self._had_failure = False
        self._files: dict[str, dict[str, str | Path]] = {}
        """Key of a run -> its files, until they are stored."""
        self._refused: dict[str, str] = {}
        """Key of a run -> why the server refuses what it should show."""

    def __enter__(self) -> MlflowTracker:
        return self

    def __exit__(self, *_: object) -> None:
        warning = self.close(CLOSING_SECONDS)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)

    def __call__(self, event: Event) -> None:
        """Take notice of an event."""
        self._events.put(event)
        if isinstance(event, SweepStarted):
            set_environment()
            spec, experiment = self._spec, self._spec.tracking.experiment or self._spec.name
            marks = (spec.name, spec.compute_identity(), experiment, event.sweep_id)
            self._store = MlflowStore(make_absolute(spec.tracking.uri), SweepIdentity(*marks))
            self._thread.start()
        elif isinstance(event, SweepFinished):
            self._wake.set()

    def log_figures(self) -> None:
        """Attach `front.png`, and a report that is not private, to the sweep's run if new."""
        self._events.put(None)

    def get_state(self) -> TrackingState | None:
        """Return how far MLflow is; None before the sweep has started and after `close`."""
        if self._store is None or self._is_closing:
            return None
        pending, problem = self._count_pending(), self._explain_pending()
        if problem:
            return TrackingState("away", pending, problem)
        is_behind = self._had_failure and not self._is_clean
        return TrackingState("catching up" if is_behind else "up to date", pending, "")

    def get_front_link(self) -> str:
        """Return the address of the front in MLflow, relative for a database; may be empty."""
        return self._store.site.build_link() if self._store and self._store.site else ""

    def close(self, timeout: float = CLOSING_SECONDS) -> str:
        """Send what is left, for at most `timeout` seconds; return a warning for the user.

        It says how much is left or was refused, and what happens to it; empty if all was sent.
        """
        if self._store is None or self._is_closing:
            return ""
        self._deadline = time.monotonic() + timeout
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout)
        uri, left, warnings = redact_passwords(self._spec.tracking.uri), self._count_pending(), []
        if left:
            warnings.append(
                f"{left} updates did not reach {uri} ({self._explain_pending() or 'out of time'}); "
                f"they are kept in {self._spec.directory} and sent the next time the same command "
                "runs, or by\n"
                f"  python -m gdpo_tune.report {shlex.quote(self._spec.location)} --sync"
            )
        for key, reason in self._refused.items():
            name = "of the sweep" if key == SWEEP else f"of trial {key}"
            warnings.append(f"{uri} refused updates {name}: {reason}")
        return "; ".join(warnings)

    def _count_pending(self) -> int:
        return self._events.qsize() + len(self._projection.changed) + len(self._files)

    def _explain_pending(self) -> str:
        has_crashed = not self._thread.is_alive() and not self._is_clean and not self._problem
        if has_crashed and time.monotonic() <= self._deadline:
            return "the tracking thread crashed, see its traceback"
        return self._problem or (LEFTOVER if self._files and self._is_clean else "")

    def _run(self) -> None:
        assert self._store is not None, "it starts with the sweep"
        delay, store = FIRST_DELAY, self._store
        while True:
            is_closing = self._is_closing
            try:
                for _ in range(self._events.qsize()):
                    self._projection.take(self._events.get())
                held = store.runs.get(SWEEP)
                if is_closing and (held is None or held.status == "RUNNING"):
                    self._projection.fail_unless_ended()
                self._compare(store, is_closing=is_closing)
            except (
                ServerUnavailable,
                ContentRefused,
                OSError,
                StoreError,
                StoreUnreachableError,
            ) as error:
                self._problem, self._had_failure = str(error), True
                store.reset()
                pause, delay = delay, min(2 * delay, MAX_DELAY)
            else:
                self._problem, pause, delay = "", INTERVAL, FIRST_DELAY
            # A sweep that has no news does not wait for a server that is away.
            gives_up = self._problem and not self._projection.has_started_trial
            is_done = self._is_clean and not self._files and self._events.empty()
            if is_closing and (is_done or gives_up or time.monotonic() > self._deadline):
                return
            if is_closing:
                time.sleep(CLOSING_DELAY)
            elif self._wake.wait(pause):
                self._wake.clear()

    def _compare(self, store: MlflowStore, *, is_closing: bool) -> None:
        """Write what MLflow lacks: the sweep's run first, then trials, then files."""
        projection = self._projection
        self._is_clean = False
        if site := store.connect():
            projection.touch_all()
            start = store.runs[SWEEP].start
            store.tag_experiment(build_experiment_tags(projection.spec, site, start))
        assert store.site is not None, "it is connected"
        projection.refresh_front(store.site)
        for key in list(projection.changed):
            try:
                content = projection.build(key, store.site, store.runs.get(key))
                store.write(store.get_run(key, content), content)
            except ContentRefused as error:
                is_first, self._refused[key] = key not in self._refused, str(error)
                if is_first:
                    raise  # it may come from stale knowledge of MLflow: connect again
                projection.forget(key, is_stored=False)
            else:
                self._refused.pop(key, None)
                self._files |= {key: content.files} if content.files else {}
                projection.forget(key, is_stored=True)
            if time.monotonic() > self._deadline:
                return
        self._store_files(store)
        if is_closing and self._had_failure:
            store.delete_duplicates()
        self._is_clean = True

    def _store_files(self, store: MlflowStore) -> None:
        """Store files and versions; if their own store is away, they alone are left."""
        for key in sorted(self._files, key=lambda key: key == SWEEP):  # versions name the others
            try:
                store.write_files(store.runs[key], self._files[key])
                if key == SWEEP and self._projection.is_final:
                    store.register(self._spec.name, self._projection.versions)
            except ServerUnavailable:
                return
            except ContentRefused:
                continue
            del self._files[key]


def sync(spec: SweepSpec) -> int:
    """Bring MLflow up to date with the ledger, the metric files and the figures of a sweep.

    The result is the exit status: 1 if something is left; stderr has the reason.

    Raises:
        LedgerHeldError: the sweep runs, and sends by itself.
        TrackingError: `tracking.required`, and the server does not answer.
    """
    from gdpo_tune.ledger import Ledger  # slow to import

    check_server(spec)
    with Ledger.open(spec) as ledger:
        records, sessions = tuple(ledger.get_records()), ledger.get_sessions()
        tracker = MlflowTracker(spec)
        tracker(SweepStarted(records, sweep_id=ledger.sweep_id))
        has_ended = bool(sessions and sessions[-1].get("ending"))
        tracker(SweepFinished(records, interrupted=not has_ended))
        wait_until_sent(tracker)
        warning = tracker.close()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
        return 1
    print("MLflow: up to date")
    return 0


def wait_until_sent(tracker: MlflowTracker) -> None:
    """Wait until everything is sent, or the server has taken nothing for `PATIENCE` seconds."""
    least, progressed, printed = sys.maxsize, time.monotonic(), time.monotonic()
    while (state := tracker.get_state()) is not None and state.pending:
        now = time.monotonic()
        if state.pending < least:
            least, progressed = state.pending, now
        if state.kind == "away" and now - progressed > PATIENCE:
            return
        if now - printed > PRINT_SECONDS:
            # A thread that keeps up calls itself up to date while its last request is on its way.
            left = f"MLflow: {state.pending:,} updates left"
            print(state if state.kind == "away" else left, flush=True)
            printed = now
        time.sleep(POLL_SECONDS)
