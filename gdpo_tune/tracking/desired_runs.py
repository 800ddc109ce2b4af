"""Content that MLflow should have of a sweep: records from events, curves from the trials' files.

The ledger and the files hold all of it, so nothing here has to survive. Only the tracking thread
uses it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core import events
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.object_store import SPEC, StoreDirectory
from gdpo_tune.core.trial_files import STEPS_FILE, StepsReader
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.results.public_record import hide_texts, list_public_curves, make_public
from gdpo_tune.spec.model import dump_public_yaml
from gdpo_tune.tracking import run_content
from gdpo_tune.tracking.run_content import SWEEP, RunContent, to_milliseconds

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_content import FrontContent
    from gdpo_tune.tracking.mlflow_store import HeldRun
    from gdpo_tune.tracking.views import Site

MIN_INTERVAL = 2.0
"""Seconds between two computations of the front, at least."""
MAX_CPU_SHARE = 0.01
"""Largest share of the time for them, so that the driver rarely waits for Python's lock."""


class DesiredRuns:
    """The runs that MLflow should have, and which of them may differ from what it has."""

    def __init__(self, spec: SweepSpec) -> None:
        self.changed: dict[str, None] = {}
        """Keys of runs that may lack something in MLflow, in the order of their changes."""
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
        """Number -> directory and address of a trial's files."""
        self._readers: dict[int, StepsReader] = {}
        """Of trials that have run since this process began, until MLflow has all their points."""
        self._status, self._end = "", 0
        self._front: FrontContent | None = None
        self._is_front_stale, self._front_due = False, 0.0

    def take(self, event: events.Event | None) -> None:
        """Take in an event; None: there are new figures."""
        match event:
            case None:
                self.changed[SWEEP] = None
            case events.SweepStarted():
                self.changed[SWEEP] = None
                for record in event.records:
                    self._take_record(record)
            case events.TrialStarted():
                # Not sooner: a finished sweep starts nothing, and its run keeps its state.
                self._status, self._end, self.changed[SWEEP] = "RUNNING", 0, None
                self._take_record(event.record)
                if event.record.directory is not None:
                    reader = StepsReader(event.record.directory)
                    self._readers.setdefault(event.record.number, reader)
            case events.TrialProgress():
                self.changed[str(event.number)] = None
            case events.TrialPaused() | events.TrialFinished():
                self._take_record(event.record)
            case events.SweepFinished():
                for record in event.records:
                    self._take_record(record)
                self._finish("KILLED" if event.interrupted else "FINISHED")
                self.is_final = not event.interrupted
            case _:
                pass  # the ledger has it; MLflow shows trials

    def fail_unless_ended(self, shown: str) -> None:
        """Give a sweep that ended without an event the state of a crash; MLflow has `shown`."""
        if (self._status or shown) == "RUNNING":
            self._finish("FAILED")

    def mark_all(self) -> None:
        """Compare every run again: MLflow may have lost some."""
        self.changed = dict.fromkeys([SWEEP, *map(str, sorted(self._records))])

    def mark_stored(self, key: str) -> None:
        """Note that a run is as it should be."""
        self.changed.pop(key, None)
        if key != SWEEP and not self._records[int(key)].is_open:
            self._readers.pop(int(key), None)

    def refresh_front(self, site: Site) -> None:
        """Compute the front of all records, if it is due; any trial may have another rank then."""
        if not self._is_front_stale or time.monotonic() < self._front_due:
            return
        from gdpo_tune.tracking.front_content import build_front_content  # numpy takes a while

        began = time.monotonic()
        records = [self._records[number] for number in sorted(self._records)]
        now = to_milliseconds(time.time())
        self._front = build_front_content(self.spec, records, site, now)
        self._is_front_stale = False
        self._front_due = began + max(MIN_INTERVAL, (time.monotonic() - began) / MAX_CPU_SHARE)
        self.mark_all()

    def build(self, key: str, site: Site, held: HeldRun | None) -> RunContent:
        """Return what a run should show; its curves only if those that are `held` may lack points.

        Raises:
            StoreError, StoreUnreachableError: measurements are on an object store, out of reach.
        """
        return self._build_sweep(site) if key == SWEEP else self.build_trial(key, held)

    def build_trial(self, key: str, held: HeldRun | None) -> RunContent:
        """Return what a trial's run should show; arguments and errors are those of `build`."""
        record = self._records[int(key)]
        record = replace(record, params=self.spec.space.drop_inactive(record.params))
        content = run_content.build_trial_content(record, self.spec.name, self._inputs)
        if record.state == "running" and self._end:
            content.status, content.end = "KILLED", self._end
        if self._front and record.number in self._front.trials:
            content.add(self._front.trials[record.number])
        if self._front and self.is_final:
            content.files = self._front.policies.get(record.number, {})
        content.curves = [
            (name, value, to_milliseconds(each.time or 0.0), each.step)
            for each in self._read_steps(record, held)
            for name, value in run_content.select_curve_values(each, self._training).items()
            if not self._is_private or name in self._public_curves
        ]
        return content

    @property
    def versions(self) -> Sequence[Mapping[str, object]]:
        """Versions that the registry should hold at the end."""
        return self._front.versions if self._front else []

    def _build_sweep(self, site: Site) -> RunContent:
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

    def _take_record(self, record: TrialRecord) -> None:
        number = record.number
        self._places[number] = (record.directory, record.address)
        if self._is_private:
            record = replace(hide_texts(record), directory=None, checkpoint=None, address="")
        if self._records.get(number) != record:
            self._records[number] = record
            self.changed[str(number)] = None
            self._is_front_stale = True

    def _read_steps(self, record: TrialRecord, held: HeldRun | None) -> list[Measurement]:
        directory, address = self._places[record.number]
        reader = self._readers.get(record.number)
        # The tag `state` comes after all points, and a trial that did not run since adds none.
        shown = held.tags.get("state") if held else ""
        has_all = not record.is_open and shown == record.state and reader is None
        if directory is None or has_all:
            return []
        if address:
            steps = StoreDirectory(address, patience=0.0).read(STEPS_FILE)
            if steps is not None:
                directory.mkdir(parents=True, exist_ok=True)
                write_atomically(directory / STEPS_FILE, steps)
        return (reader or StepsReader(directory)).read()

    def _finish(self, status: str) -> None:
        """Give the sweep its last state; a trial that still runs ends here."""
        self._status, self._end = status, to_milliseconds(time.time())
        self.mark_all()
        self._is_front_stale, self._front_due = True, 0.0
