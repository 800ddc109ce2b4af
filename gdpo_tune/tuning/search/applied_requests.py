"""Requests of people to a running sweep, as the driver takes them from their files.

Each is recorded in the ledger, then its file is removed, then the caller applies it. So a kill at
any moment loses none: a recorded request follows from the ledger after a restart, and one that is
not recorded still has its file. None is applied twice, because its id is in the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gdpo_tune.core.events import RecordedRequest
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.request_files import RequestFile, list_pending, set_aside
from gdpo_tune.ledger.request_rules import judge

POLL_SECONDS = 1.0
"""Seconds between two looks at the directory of requests."""


class RequestInbox:
    """Requests that wait for the driver of one sweep."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._polled = float("-inf")
        self._ignored: set[Path] = set()
        """Files that can be neither used nor moved."""

    def is_due(self) -> bool:
        """Return whether it is time for another look."""
        return self._clock() - self._polled >= POLL_SECONDS

    def take(self, report_damage: Callable[[str], None] | None = None) -> Iterator[RecordedRequest]:
        """Record the requests that wait and yield each one, for the caller to apply at once.

        A file that is no request is set aside and reported, if `report_damage` is there.
        """
        self._polled = self._clock()
        for file in list_pending(self._ledger.directory):
            if file.request is None:
                if report_damage is not None and file.path not in self._ignored:
                    self._set_aside(file, report_damage)
            elif file.request.id in {r.id for r in self._ledger.get_requests()}:
                remove(file.path)
            else:
                now = time.time()
                recorded = judge(self._ledger.take_snapshot(now), file.request, now)
                self._ledger.record_request(recorded)
                remove(file.path)
                yield recorded

    def _set_aside(self, file: RequestFile, report_damage: Callable[[str], None]) -> None:
        try:
            set_aside(file.path)
            where = "it was moved to requests/damaged"
        except OSError:
            self._ignored.add(file.path)
            where = "it stays there"
        report_damage(f"{file.path.name} in requests/ is no request ({file.problem}); {where}")


def remove(path: Path) -> None:
    """Remove the file of a recorded request; one that may not be removed does no harm."""
    with suppress(OSError):
        path.unlink()
