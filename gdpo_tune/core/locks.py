"""Kernel locks on files: they end with their process, so no crash leaves a stale one."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core.errors import LedgerHeldError

PROBES = 5
"""Attempts: `is_locked` holds a lock for an instant."""
_HOLDER = re.compile(r"process (\d+) on (.+) since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def try_lock(file: int) -> bool:
    """Lock an open file for this process alone; return False if another one holds it."""
    for attempt in range(PROBES):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01 if attempt < PROBES - 1 else 0.0)
    return False


def is_locked(path: Path) -> bool:
    """Return whether a live process holds the lock of a file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


class Lease:
    """The exclusive right to write in a directory, held until `release` or the process's end.

    The text of the file only names the holder. Child processes do not inherit the lease.
    """

    def __init__(self, path: Path) -> None:
        """Take the lease; create the directory of the file if it is missing.

        Raises:
            LedgerHeldError: at once, if another live process holds it; the message names it.
            OSError: the directory or the file cannot be created.
        """
        self.path, self._file = path, -1
        while self._file < 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if not try_lock(file):
                holder = os.pread(file, 1024, 0).decode(errors="replace").strip()
                os.close(file)
                raise LedgerHeldError(
                    f"{path.parent} is being written by {holder or 'another process'}; wait for "
                    "it, stop it, or choose another --name (of a sweep) or --out (of a training)"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    self._file = file
                    break
            os.close(file)  # the last holder has moved the directory between our open and our lock
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True)
class Driver:
    """Process that took a lease last."""

    process: int
    host: str
    since: float
    """Unix seconds."""
    is_alive: bool | None
    """True if it holds the lease now; None: unknown, because it is on another machine."""


def find_driver(lock: Path) -> Driver | None:
    """Return the last holder of a lease; None if there was none."""
    try:
        found = _HOLDER.match(lock.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            return None
        since = time.mktime(time.strptime(found[3], "%Y-%m-%d %H:%M:%S"))
    except (OSError, ValueError, OverflowError):
        return None
    is_here = found[2] == socket.gethostname()
    alive = is_locked(lock) or (False if is_here else None)  # not every shared disk shares locks
    return Driver(int(found[1]), found[2], since, alive)
