"""The listener that keeps MLflow in step with a sweep, without ever delaying the sweep.

The driver only puts events on a queue. One thread compares, every few seconds, the content that
MLflow should have with what it has, and writes the difference. After an error it connects again and
compares everything. The ledger and the trials' files hold everything, so the next start, or `sync`,
sends what is missing.
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
from gdpo_tune.tracking.desired_runs import DesiredRuns
from gdpo_tune.tracking.mlflow_store import MlflowStore
from gdpo_tune.tracking.run_content import SWEEP
from gdpo_tune.tracking.server import (
    ContentRefused,
    ServerUnavailable,
    check_server,
    set_environment,
)
from gdpo_tune.tracking.views import build_experiment_tags

INTERVAL, CLOSING_INTERVAL = 5.0, 0.5
"""Seconds between two comparisons, and while the process waits to end."""
CLOSING_SECONDS = 10.0
VIEWS = "views"
NAMES = {SWEEP: "of the sweep", VIEWS: "of the experiment's views"}
"""Key of what a server may refuse, besides numbers of trials -> its name for a person."""
POLL_SECONDS, PRINT_SECONDS = 0.5, 5.0


class MlflowTracker:
    """Shows a sweep in MLflow: a run for the sweep, a nested run per trial, and the front.

    Use it as a context manager. Nothing is opened before `SweepStarted`.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._desired = DesiredRuns(spec)
        self._store: MlflowStore | None = None
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._wake, self._is_closing = threading.Event(), False
        self._deadline = float("inf")
        self._problem = ""
        """Why the last attempt failed; empty once the server has answered again."""
        self._is_behind = self._had_failure = False
        self._files: dict[str, dict[str, str | Path]] = {}
        """Key of a run -> its files, until they are stored: their store may be away alone."""
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
            self._store = MlflowStore(self._spec, event.sweep_id)
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
        return TrackingState("catching up" if self._is_behind else "up to date", pending, "")

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
            name = NAMES.get(key, f"of trial {key}")
            warnings.append(f"{uri} refused updates {name}: {reason}")
        return "; ".join(warnings)

    def _count_pending(self) -> int:
        return self._events.qsize() + len(self._desired.changed) + len(self._files)

    def _explain_pending(self) -> str:
        has_crashed = not self._thread.is_alive() and time.monotonic() <= self._deadline
        if has_crashed and self._count_pending():
            return "the tracking thread crashed, see its traceback"
        return self._problem

    def _run(self) -> None:
        assert self._store is not None, "it starts with the sweep"
        while True:
            is_closing = self._is_closing  # read first: no event comes after it is set
            try:
                self._send(self._store, is_closing=is_closing)
            except (
                ServerUnavailable,
                ContentRefused,
                OSError,
                StoreError,
                StoreUnreachableError,
            ) as error:
                self._problem, self._is_behind, self._had_failure = str(error), True, True
                self._store.reset()
            if not is_closing:
                self._wake.wait(INTERVAL)
                self._wake.clear()
            elif self._count_pending() and time.monotonic() < self._deadline:
                time.sleep(CLOSING_INTERVAL)
            else:
                return

    def _send(self, store: MlflowStore, *, is_closing: bool) -> None:
        """Write what MLflow lacks: the sweep's run first, then trials, then files."""
        desired = self._desired
        for _ in range(self._events.qsize()):
            desired.take(self._events.get())
        site = store.connect()
        if store.runs[SWEEP].is_deleted:  # by a person, so all of the sweep stays as it is
            desired.changed.clear()
            self._files.clear()
            self._problem, self._is_behind = "", False
            return
        if site:
            desired.mark_all()
            start = store.runs[SWEEP].start
            try:
                store.tag_experiment(build_experiment_tags(desired.spec, site, start))
            except ContentRefused as error:  # data does not wait for what decorates it
                self._refused[VIEWS] = str(error)
        self._problem = ""
        assert store.site is not None, "it is connected"
        if is_closing:
            desired.fail_unless_ended(store.runs[SWEEP].status)
        desired.refresh_front(store.site)
        for key in list(desired.changed):
            try:
                content = desired.build(key, store.site, store.runs.get(key))
                store.write(key, content)
            except ContentRefused as error:
                is_first, self._refused[key] = key not in self._refused, str(error)
                if is_first:
                    raise  # it may come from stale knowledge of MLflow: connect again
                desired.changed.pop(key)
            else:
                self._refused.pop(key, None)
                self._files |= {key: content.files} if content.files else {}
                desired.mark_stored(key)
            if time.monotonic() > self._deadline:
                return
        self._send_files(store)
        if is_closing and self._had_failure:
            store.delete_duplicates()

    def _send_files(self, store: MlflowStore) -> None:
        """Store files and versions; if their own store is away, they alone are left."""
        for key in sorted(self._files, key=lambda key: key == SWEEP):  # versions name the others
            try:
                store.write_files(key, self._files[key])
                if key == SWEEP and self._desired.is_final:
                    store.register(self._desired.versions)
            except (ServerUnavailable, ContentRefused) as error:
                name = "the sweep" if key == SWEEP else f"trial {key}"
                self._problem = f"files of {name} could not be stored: {error}"
                return
            del self._files[key]
        self._is_behind = False


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
    """Wait until everything is sent, or the server fails; say how much is left meanwhile."""
    printed = time.monotonic()
    while (state := tracker.get_state()) is not None and state.pending and state.kind != "away":
        if time.monotonic() - printed > PRINT_SECONDS:
            print(f"MLflow: {state.pending:,} updates left", flush=True)
            printed = time.monotonic()
        time.sleep(POLL_SECONDS)
