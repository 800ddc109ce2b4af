"""The process that writes a ledger, as others see it."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.ledger.journal import is_held
from gdpo_tune.ledger.opening import LOCK

_HOLDER = re.compile(r"process (\d+) on (.+) since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


@dataclass(frozen=True)
class Driver:
    """Process that took the lease of a ledger last."""

    process: int
    host: str
    since: float
    """Start of its lease, in Unix seconds."""
    is_alive: bool | None
    """True if it holds the lease now; None: unknown, because it is on another machine."""


def find_driver(directory: Path) -> Driver | None:
    """Return the last process that wrote the ledger of a sweep's directory; None if none did."""
    lock = directory / LOCK
    try:
        found = _HOLDER.match(lock.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            return None
        since = time.mktime(time.strptime(found[3], "%Y-%m-%d %H:%M:%S"))
    except (OSError, ValueError, OverflowError):
        return None
    process, host = int(found[1]), found[2]
    is_here = host == socket.gethostname()
    held = is_held(lock)
    alive = held if held or is_here else None  # not every shared disk shares locks
    return Driver(process, host, since, alive)
