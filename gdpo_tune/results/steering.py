"""Steering of a running sweep, for the command `steer`, the web page and notebooks.

    steering = Steering("runs/code")
    request = steering.request("stop", {"trial": 7}, author="anna")
    steering.wait(request.id, 10)       # RecordedRequest: what came of it

Actions and their arguments:

    stop    {"trial": 7}
    add     {"params": {"learning_rate": 1e-4}}
    clone   {"trial": 7, "changes": {"learning_rate": 2e-4}}
    merge   {"weights": {"7": 0.3, "12@40": 0.7}}
    trials  {"number": 24}
    budget  {"completions": 100000}     one or more of trials, completions, gpu_hours, hours
    pause   {}
    resume  {}
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import RecordedRequest, Request
from gdpo_tune.core.locks import LOCK, is_locked
from gdpo_tune.core.trials import Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import (
    SweepSnapshot,
    build_request,
    check_request,
    check_requests_writable,
    find_open_merge,
    leave_request,
    list_pending,
    preview_request,
)
from gdpo_tune.results.open_sweep import locate_sweep, resolve_spec_file
from gdpo_tune.spec import load_spec

POLL_SECONDS = 0.2
"""Seconds from one reading of the ledger to the next while a request waits."""


class Steering:
    """Requests to one sweep; every method reads the ledger as it is now."""

    def __init__(self, target: str | Path) -> None:
        """Find the sweep: its directory, its name under `runs`, or its file.

        A UsageError says that there is none, or what is wrong with its file.
        """
        location = locate_sweep(str(target))
        self.file, self._storage = resolve_spec_file(location, str(target))
        self.directory = self.file.parent
        """Directory of the sweep on this machine."""

    def __repr__(self) -> str:
        return f"<steering of {self.directory}>"

    @property
    def is_running(self) -> bool:
        """True if a process works on the sweep now."""
        return is_locked(self.directory / LOCK)

    @property
    def pause(self) -> RecordedRequest | None:
        """The request that paused the sweep, or that will; None if it is not paused."""
        return self._take_snapshot().state.pause

    def request(
        self, action: str, arguments: Mapping[str, Any], author: str | None = None
    ) -> Request:
        """Check a request and leave it for the driver, which applies it within a few seconds.

        `author` is by default the user of this process. A UsageError says why it cannot be carried
        out, and what can be done.
        """
        request = build_request(action, arguments, author)
        with self._open() as ledger:
            self._check_sweep(ledger, request)
        check_request(self._take_snapshot(), request)
        leave_request(self.directory, request)
        return request

    def request_merge(self, parts: Sequence[Part]) -> Request:
        """Return the request for a merge that waits or runs, or leave one as `request` does."""
        weights = {f"{part.trial}@{part.step}": part.weight for part in parts}
        earlier = find_open_merge(self._take_snapshot(), tuple(parts))
        return earlier or self.request("merge", {"weights": weights})

    def _take_snapshot(self) -> SweepSnapshot:
        """Return the sweep as it will be once the requests that wait have been applied."""
        files, now = list_pending(self.directory), time.time()  # first, so that none is in neither
        with self._open() as ledger:
            snapshot = ledger.take_snapshot(now if self.is_running else None)
        recorded = {earlier.id for earlier in snapshot.requests}
        for file in files:
            if file.request is not None and file.request.id not in recorded:
                snapshot = preview_request(snapshot, file.request, now)
        return snapshot

    def find(self, id: str) -> RecordedRequest | None:
        """Return what came of a request; None as long as the driver has not taken it."""
        return self.wait(id, 0)

    def wait(self, id: str, seconds: float) -> RecordedRequest | None:
        """Wait until the driver has taken a request; None if it has not within the time."""
        deadline = time.monotonic() + seconds
        with self._open() as ledger:
            while True:
                found = next((r for r in ledger.get_requests() if r.id == id), None)
                if found is not None or time.monotonic() >= deadline:
                    return found
                time.sleep(POLL_SECONDS)

    def list_requests(self) -> list[RecordedRequest]:
        """Return every request that was applied or refused, in order."""
        with self._open() as ledger:
            return list(ledger.get_requests())

    def list_pending(self) -> list[Request]:
        """Return the requests that the driver has not taken yet, in order."""
        recorded = {request.id for request in self.list_requests()}
        requests = [file.request for file in list_pending(self.directory)]
        return [r for r in requests if r is not None and r.id not in recorded]

    @contextmanager
    def _open(self) -> Generator[Ledger]:
        spec = load_spec(self.file, [self._storage], self.directory.name, to_run=False)
        with Ledger.open(spec, read_only=True) as ledger:
            yield ledger

    def _check_sweep(self, ledger: Ledger, request: Request) -> None:
        name = ledger.spec.location
        check_requests_writable(self.directory)
        if self.is_running:
            return
        if request.action in ("merge", "resume") and _find_ending(ledger):
            return  # a merge trains nothing, and runs once no pause holds it
        if ledger.spec.address:
            raise UsageError(
                f"{name} is on an object store, and no process of this machine works on it\n"
                "    fix: steer it on the machine on which its command runs"
            )
        if ending := _find_ending(ledger):
            raise UsageError(
                f"{name} has finished ({ending}), so nothing can be steered\n"
                "    fix: extend it: run its file again with a larger limit, such as "
                f"--set {ledger.spec.extension}"
            )
        if request.action == "stop":
            raise UsageError(
                f"no process works on {name}, so no trial runs that could stop\n"
                "    fix: run its file again to resume it"
            )


def _find_ending(ledger: Ledger) -> str:
    """Return why a sweep has finished; empty if it has not."""
    sessions = ledger.get_sessions()
    ending = sessions[-1].get("ending", "") if sessions else ""
    return "" if any(record.is_open for record in ledger.get_records()) else ending
