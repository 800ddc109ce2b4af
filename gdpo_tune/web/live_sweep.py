"""A sweep that may run meanwhile, read again only where its files have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.events import Outlook, RecordedRequest, Request, RequestEffect
from gdpo_tune.core.locks import Driver, find_driver
from gdpo_tune.core.object_store import JOURNAL, SPEC
from gdpo_tune.core.trial_files import STEPS_FILE, StepsReader
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import SteeringState, list_pending
from gdpo_tune.results.live import Paced
from gdpo_tune.spec import SweepSpec

IDLE_SHARE = 20
"""Reading may take one part in this many of the time, however large the sweep is."""


Planner = Callable[
    [SweepSpec, Sequence[TrialRecord], float, Sequence[tuple[str, RequestEffect]]], Outlook
]
"""Computes what is to come; only the search can. Arguments as `tuning.plan.estimate_outlook`."""


@dataclass(frozen=True)
class Snapshot:
    """Content of a sweep at one moment."""

    spec: SweepSpec
    records: Sequence[TrialRecord]
    """Empty before the sweep has started."""
    sessions: Sequence[Mapping[str, Any]]
    driver: Driver | None
    steps: Mapping[int, Sequence[Measurement]]
    """Number of each running trial -> its steps."""
    steering: SteeringState = field(default_factory=SteeringState)
    requests: Sequence[RecordedRequest] = ()
    """Those that the driver has taken."""
    pending: Sequence[Request] = ()
    """Those that wait for it."""
    problem: str = ""
    """Why the sweep cannot be read now; the rest is as it was last."""


class LiveSweep:
    """Read access to one sweep; `refresh` returns the same object while nothing has changed."""

    def __init__(
        self, load: Callable[[], SweepSpec], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the sweep for the first time.

        `load` reads its file: a driver may write another one, with more trials.
        """
        self._load = load
        self._spec = load()
        self._directory = self._spec.directory.absolute()
        self._ledger: Ledger | None = None
        self._opened: object = None
        """State of the files when the ledger was opened."""
        self._readers: dict[int, StepsReader] = {}
        self._fingerprint: object = None
        self._snapshot = Snapshot(self._spec, (), (), None, {})
        self._paced = Paced[Snapshot](IDLE_SHARE, clock=clock)

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def refresh(self) -> Snapshot:
        """Return the sweep as it is now. Reads are rate-limited."""
        return self._paced.make(self._refresh) if self._paced.is_due else self._snapshot

    def _refresh(self) -> Snapshot:
        driver, waiting = find_driver(self._directory), list_pending(self._directory)
        pending = [file.request for file in waiting if file.request is not None]
        running = [r.number for r in self._snapshot.records if r.state == "running"]
        read = [self._directory / JOURNAL, self._directory / SPEC]
        read += [self._directory / "trials" / str(n) / STEPS_FILE for n in running]
        fingerprint = ([_stamp(file) for file in read], driver, pending)
        if fingerprint != self._fingerprint or self._is_elsewhere(driver):
            try:
                found = self._read(driver, pending)
                self._fingerprint = fingerprint
                if found != self._snapshot:
                    self._snapshot = found
            except (GdpoTuneError, OSError) as error:
                self._snapshot = replace(self._snapshot, driver=driver, problem=str(error))
                self._fingerprint = None  # the same files may come back, as after a lost disk
                self.close()
        return self._snapshot

    def _is_elsewhere(self, driver: Driver | None) -> bool:
        """Return whether the ledger is that of an object store, which opening it downloads."""
        return bool(self._spec.address) and not (driver and driver.is_alive)

    def _read(self, driver: Driver | None, pending: Sequence[Request]) -> Snapshot:
        journal = _stamp(self._directory / JOURNAL)
        stamps = (_stamp(self._directory / SPEC), journal and journal[0])
        is_elsewhere = self._is_elsewhere(driver)
        if self._ledger is None or stamps != self._opened or is_elsewhere:
            # another ledger has taken its place, or the spec has changed
            self.close()
            self._readers = {}
            self._spec = self._load()
            if journal is None and not is_elsewhere:
                return Snapshot(self._spec, (), (), driver, {})
            self._ledger = Ledger.open(self._spec, read_only=True)
            self._opened = stamps
        records = self._ledger.get_records()
        requests = self._ledger.get_requests()
        taken = {request.id for request in requests}
        running = {r.number: r for r in records if r.state == "running"}
        self._readers = {
            number: self._readers.get(number) or StepsReader(record.directory)
            for number, record in running.items()
            if record.directory is not None
        }
        return Snapshot(
            self._ledger.spec,
            records,
            self._ledger.get_sessions(),
            driver,
            {number: reader.read() for number, reader in self._readers.items()},
            self._ledger.steering,
            tuple(requests),
            [request for request in pending if request.id not in taken],
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
