"""Wanted content of a sweep's runs in MLflow, folded from its events and the trials' files.

It is in memory, and follows again after a restart. Only the tracking thread uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core import events
from gdpo_tune.core.object_store import SPEC, StoreDirectory
from gdpo_tune.core.trial_files import STEPS_FILE, parse_first_steps, read_first_steps
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.results.public_record import hide_texts, list_public_curves, make_public
from gdpo_tune.spec.model import dump_public_yaml
from gdpo_tune.tracking import run_content
from gdpo_tune.tracking.run_content import SWEEP, RunContent

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_content import FrontContent
    from gdpo_tune.tracking.mlflow_store import HeldRun
    from gdpo_tune.tracking.views import Site

MIN_INTERVAL = 2.0
"""Seconds between two computations of the front, at least."""
MAX_CPU_SHARE = 0.01
"""Largest share of the time for them, so that the driver rarely waits for Python's lock."""
MAX_HELD = 50_000
"""Measurements that wait in memory at most; beyond, they are read from the trials' files."""


class Projection:
    """The runs that MLflow should have, and which of them have changed."""

    def __init__(self, spec: SweepSpec) -> None:
        self.changed: dict[str, None] = {}
        """Keys of runs that may lack something in MLflow, in the order of their changes."""
        self.has_started_trial = False
        self.is_final = False
        """True once the front is the last one, so that it belongs into the registry."""
        self._is_private = spec.tracking.private
        self._public_curves = list_public_curves(spec) if self._is_private else set[str]()
        self.spec = make_public(spec) if self._is_private else spec
        """The specification as MLflow may show it."""
        self._directory, self._training = spec.directory.absolute(), spec.training
        self._inputs = run_content.build_inputs(self.spec)
        self._records: dict[int, TrialRecord] = {}
        """As MLflow may show them."""
        self._places: dict[int, tuple[Path | None, str]] = {}
        self._status, self._end = "", 0
        self._curves: dict[int, list[Measurement]] = {}
        """Number -> measurements that no request has stored."""
        self._held = 0
        self._last_steps: dict[int, int] = {}
        self._unread: set[int] = set()
        """Trials whose files may hold measurements that MLflow lacks."""
        self._stale_copies: set[int] = set()
        """Trials of which an object store may hold more than the copy on this machine."""
        self._front: FrontContent | None = None
        self._is_front_stale, self._front_due = False, 0.0
        self._clock = 0

    def take(self, event: events.Event | None) -> None:
        """Take in an event; None: there are new figures."""
        match event:
            case None:
                self.changed[SWEEP] = None
            case events.SweepStarted():
                self._is_front_stale = bool(event.records)
                self.changed[SWEEP] = None
                for record in event.records:
                    self._take_record(record)
                    self._unread.add(record.number)
            case events.TrialProgress():
                number, last = event.number, self._last_steps.get(event.number, -1)  # a merge has 0
                new = [each for each in (*event.earlier, event.measurement) if each.step > last]
                if not new:
                    return
                self._last_steps[number] = new[-1].step
                self._curves.setdefault(number, []).extend(new)
                self.changed[str(number)] = None
                self._held += len(new)
                if self._held > MAX_HELD:
                    self._doubt(self._curves)
                    self._curves, self._held = {}, 0
            case events.TrialStarted() | events.TrialPaused() | events.TrialFinished():
                number = event.record.number
                if isinstance(event, events.TrialStarted):
                    # Not sooner: a finished sweep starts nothing, and its run keeps its state.
                    self._status, self._end, self.has_started_trial = "RUNNING", 0, True
                    self.changed[SWEEP] = None
                    if number in self._records:  # its lost process held some back
                        self._unread.add(number)
                elif isinstance(event, events.TrialFinished):
                    self._is_front_stale = True
                    self._unread.add(number)
                    if event.record.state == "failed":  # it never sent what it held back
                        self._stale_copies.add(number)
                self._take_record(event.record)
            case events.SweepFinished():
                for record in event.records:
                    self._take_record(record)
                self._finish("KILLED" if event.interrupted else "FINISHED")
                self.is_final = not event.interrupted
            case _:
                pass  # the ledger has it; MLflow shows trials

    def fail_unless_ended(self) -> None:
        """Give a sweep that ended without an event the state of a crash."""
        if self._status in ("", "RUNNING"):
            self._finish("FAILED")

    def touch_all(self) -> None:
        """Compare every run again: MLflow may have lost some."""
        self.changed = dict.fromkeys([SWEEP, *map(str, sorted(self._records))])
        self._unread |= self._records.keys()

    def forget(self, key: str, *, is_stored: bool) -> None:
        """Note that a run is as it should be, or else that MLflow refuses its content."""
        self.changed.pop(key, None)
        if key != SWEEP:
            self._held -= len(self._curves.pop(int(key), ()))
            if is_stored:
                self._unread.discard(int(key))
                self._stale_copies.discard(int(key))
            else:
                self._doubt([int(key)])

    def refresh_front(self, site: Site) -> None:
        """Compute the front of all records, if it is due."""
        if not self._is_front_stale or time.monotonic() < self._front_due:
            return
        from gdpo_tune.tracking.front_content import build_front_content  # numpy takes a while

        began, before = time.monotonic(), self._front
        records = [self._records[number] for number in sorted(self._records)]
        self._front = build_front_content(self.spec, records, site, self._read_increasing_clock())
        for number, content in self._front.trials.items():
            earlier = before and before.trials.get(number)
            if earlier and _list_marks(earlier) == _list_marks(content):
                content.values = earlier.values  # with their times
            else:
                self.changed[str(number)] = None
        policies = map(str, self._front.policies) if self.is_final else ()
        self.changed |= dict.fromkeys([SWEEP, *policies])
        self._is_front_stale = False
        self._front_due = began + max(MIN_INTERVAL, (time.monotonic() - began) / MAX_CPU_SHARE)

    def build(self, key: str, site: Site, held: HeldRun | None) -> RunContent:
        """Return what a run should show; its curves at least beyond what is `held`.

        Raises:
            StoreError, StoreUnreachableError: measurements are on an object store, out of reach.
        """
        if key == SWEEP:
            from gdpo_tune.results.wording import FRONT_FILE, REPORT_FILE

            content = run_content.build_sweep_content(self.spec, site.build_link(), self._inputs)
            # A report quotes reasons and incidents.
            names = [FRONT_FILE] if self._is_private else [REPORT_FILE, FRONT_FILE]
            content.files = {SPEC: dump_public_yaml(self.spec)}
            content.files |= {name: self._directory / name for name in names}
            content.status, content.end = self._status, self._end or None
            if self._front:
                content.add(self._front.sweep)
            return content
        record = self._records[int(key)]
        content = run_content.build_trial_content(record, self.spec.name, self._inputs)
        if record.state == "running" and self._end:
            content.status, content.end = "KILLED", self._end
        if self._front and record.number in self._front.trials:
            content.add(self._front.trials[record.number])
        if self._front and self.is_final:
            content.files = self._front.policies.get(record.number, {})
        steps, started = self._list_measurements(record, held), record.started or 0.0
        points = run_content.iterate_points(steps, started, self._training)
        shown = self._public_curves
        content.curves = [p for p in points if not self._is_private or p[0] in shown]
        return content

    @property
    def versions(self) -> Sequence[Mapping[str, object]]:
        """Versions that the registry should hold at the end."""
        return self._front.versions if self._front else []

    def _take_record(self, record: TrialRecord) -> None:
        number = record.number
        self._places[number] = (record.directory, record.address)
        if self._is_private:
            record = replace(hide_texts(record), directory=None, checkpoint=None, address="")
        if self._records.get(number) != record:
            self._records[number] = record
            self.changed[str(number)] = None

    def _doubt(self, numbers: Iterable[int]) -> None:
        """Note that measurements of trials are no longer in memory."""
        numbers = list(numbers)
        self._unread.update(numbers)
        self._stale_copies.update(numbers)

    def _list_measurements(self, record: TrialRecord, held: HeldRun | None) -> list[Measurement]:
        number, measurements = record.number, self._curves.get(record.number, [])
        directory, address = self._places[number]
        # A trial that MLflow shows as ended has nothing new in its file: most need no reading.
        shown = held.tags.get("state") if held else ""
        has_all = not record.is_open and shown == record.state
        if number not in self._unread or directory is None or has_all:
            return measurements
        if address and number in self._stale_copies:
            content = StoreDirectory(address, patience=0.0).read(STEPS_FILE) or b""
            read = parse_first_steps(content.splitlines())
        else:
            read = read_first_steps(directory)
        return [*read, *(m for m in measurements if not read or m.step > read[-1].step)]

    def _finish(self, status: str) -> None:
        """Give the sweep its last state; a trial that still runs ends here."""
        self._status, self._end = status, self._read_increasing_clock()
        self.changed[SWEEP] = None
        self._is_front_stale, self._front_due = True, 0.0
        for record in self._records.values():
            if record.state == "running":
                self.changed[str(record.number)] = None
                self._unread.add(record.number)

    def _read_increasing_clock(self) -> int:
        # MLflow's latest value is by time, in milliseconds
        self._clock = max(run_content.to_milliseconds(time.time()), self._clock + 1)
        return self._clock


def _list_marks(content: RunContent) -> str:
    values = {name: value for name, (value, _) in content.values.items()}
    return json.dumps([content.tags, values])
