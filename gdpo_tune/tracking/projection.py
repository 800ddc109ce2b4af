"""What MLflow should show of a sweep: a fold over its events, with the trials' own files behind it.

The ledger and `steps.jsonl` of each trial are the durable record. Everything here is in memory, and
follows from them again after a restart. Only the tracking thread uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core import events
from gdpo_tune.core.steps import read_first_steps
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.spec import dump_public_yaml
from gdpo_tune.tracking import run_content
from gdpo_tune.tracking.run_content import SWEEP, RunContent

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.tracking.front_content import FrontContent
    from gdpo_tune.tracking.mlflow_store import HeldRun
    from gdpo_tune.tracking.views import Site

FIGURES = ("report.html", "front.png")
LEAST_SECONDS = 2.0
"""Least time between two computations of the front."""
TIME_SHARE = 0.01
"""Largest share of the time for them, so that the driver rarely waits for Python's lock."""
MOST_HELD = 50_000
"""Measurements that wait in memory at most; beyond, they are read from the trials' files."""


class Projection:
    """The runs that MLflow should have, and which of them have changed."""

    def __init__(self, spec: SweepSpec) -> None:
        self.changed: dict[str, None] = {}
        """Keys of runs that may lack something in MLflow, in the order of their changes."""
        self.has_started_trial = False
        self.final = False
        """True once the front is the last one, so that it belongs into the registry."""
        self._spec = spec
        self._inputs = run_content.build_inputs(spec)
        self._records: dict[int, TrialRecord] = {}
        self._status, self._end = "", 0
        self._curves: dict[int, list[Measurement]] = {}
        """Number -> measurements that no request has stored."""
        self._held = 0
        """Number of these measurements."""
        self._last_steps: dict[int, int] = {}
        self._unread: set[int] = set()
        """Trials whose files may hold measurements that MLflow lacks."""
        self._front: FrontContent | None = None
        self._front_stale, self._front_due = False, 0.0
        self._clock = 0

    def take(self, event: events.Event | None) -> None:
        """Take in an event; None: there are new figures."""
        match event:
            case None:
                self.changed[SWEEP] = None
            case events.SweepStarted():
                self._front_stale = bool(event.records)
                self.changed[SWEEP] = None
                for record in event.records:
                    self._take_record(record)
                    self._unread.add(record.number)
            case events.TrialProgress():
                self._take_measurements(event.number, [*event.earlier, event.measurement])
            case events.TrialStarted() | events.TrialPaused() | events.TrialFinished():
                if isinstance(event, events.TrialStarted):
                    # Not sooner: a finished sweep starts nothing, and its run keeps its state.
                    self._status, self._end, self.has_started_trial = "RUNNING", 0, True
                    self.changed[SWEEP] = None
                    if event.record.number in self._records:  # its lost process held some back
                        self._unread.add(event.record.number)
                elif isinstance(event, events.TrialFinished):
                    self._front_stale = True
                    self._unread.add(event.record.number)
                self._take_record(event.record)
            case events.SweepFinished():
                for record in event.records:
                    if self._records.get(record.number) != record:
                        self._take_record(record)
                self.end("KILLED" if event.interrupted else "FINISHED")
                self.final = not event.interrupted
            case _:
                pass  # the ledger has it; MLflow shows trials

    def end(self, status: str) -> None:
        """Give the sweep its last state; a trial that still runs ends here."""
        self._status, self._end = status, self._tick()
        self.changed[SWEEP] = None
        self._front_stale, self._front_due = True, 0.0
        for record in self._records.values():
            if record.state == "running":
                self.changed[str(record.number)] = None
                self._unread.add(record.number)

    def fail_unless_ended(self) -> None:
        """Give a sweep that ended without an event the state of a crash."""
        if self._status in ("", "RUNNING"):
            self.end("FAILED")

    def touch_all(self) -> None:
        """Compare every run again: MLflow may have lost some."""
        self.changed = dict.fromkeys([SWEEP, *map(str, sorted(self._records))])
        self._unread |= self._records.keys()

    def forget(self, key: str) -> None:
        """Note that MLflow holds a run as it is now."""
        self.changed.pop(key, None)
        if key != SWEEP:
            self._held -= len(self._curves.pop(int(key), ()))
            self._unread.discard(int(key))

    def refresh_front(self, site: Site) -> None:
        """Compute the front of all records, if it is due."""
        if not self._front_stale or time.monotonic() < self._front_due:
            return
        from gdpo_tune.tracking.front_content import build_front_content  # numpy takes a while

        began, before = time.monotonic(), self._front
        records = [self._records[number] for number in sorted(self._records)]
        self._front = build_front_content(self._spec, records, site, self._tick())
        for number, content in self._front.trials.items():
            earlier = before and before.trials.get(number)
            if earlier and _describe_marks(earlier) == _describe_marks(content):
                content.values = earlier.values  # with their times
            else:
                self.changed[str(number)] = None
        self.changed |= dict.fromkeys([SWEEP, *(map(str, self._front.policies) if self.final else ())])
        self._front_stale = False
        self._front_due = began + max(LEAST_SECONDS, (time.monotonic() - began) / TIME_SHARE)

    def build(self, key: str, site: Site, held: HeldRun | None) -> RunContent:
        """Return what a run should show; its curves at least beyond what is `held`."""
        if key == SWEEP:
            content = run_content.build_sweep_content(self._spec, site.build_link())
            content.files = {"spec.yaml": dump_public_yaml(self._spec)}
            content.files |= {name: self._spec.directory.absolute() / name for name in FIGURES}
            content.status, content.end = self._status, self._end or None
            if self._front:
                content.add(self._front.sweep)
            return content
        record = self._records[int(key)]
        content = run_content.build_trial_content(record, self._spec.name, self._inputs)
        if record.state == "running" and self._end:
            content.status, content.end = "KILLED", self._end
        if self._front and record.number in self._front.trials:
            content.add(self._front.trials[record.number])
        if self._front and self.final:
            content.files = self._front.policies.get(record.number, {})
        content.curves = list(self._list_points(record, held))
        return content

    @property
    def versions(self) -> list[Mapping[str, object]]:
        """Versions that the registry should hold at the end."""
        return list(self._front.versions) if self._front else []

    def _take_record(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        self.changed[str(record.number)] = None

    def _take_measurements(self, number: int, measurements: Iterable[Measurement]) -> None:
        last = self._last_steps.get(number, 0)
        new = [each for each in measurements if each.step > last]
        if not new:
            return
        self._last_steps[number] = new[-1].step
        self._curves.setdefault(number, []).extend(new)
        self.changed[str(number)] = None
        self._held += len(new)
        if self._held > MOST_HELD:
            self._unread |= self._curves.keys()
            self._curves, self._held = {}, 0

    def _list_points(self, record: TrialRecord, held: HeldRun | None) -> Iterable[run_content.Point]:
        measurements = self._curves.get(record.number, [])
        # A trial that MLflow shows as ended has nothing new in its file: most need no reading.
        has_ended = held is not None and not record.is_open and held.tags.get("state") == record.state
        if record.number in self._unread and record.directory and not has_ended:
            read = read_first_steps(record.directory)
            measurements = [*read, *(m for m in measurements if not read or m.step > read[-1].step)]
        started, training = record.started or 0.0, self._spec.training
        return run_content.iterate_points(measurements, started, training)

    def _tick(self) -> int:
        """Return milliseconds since 1970, always increasing: MLflow's latest value is by time."""
        self._clock = max(run_content.to_milliseconds(time.time()), self._clock + 1)
        return self._clock


def _describe_marks(content: RunContent) -> str:
    values = {name: value for name, (value, _) in content.values.items()}
    return json.dumps([content.tags, values])
