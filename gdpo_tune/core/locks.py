"""Kernel locks on files: they end with their process, so no crash leaves a stale one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gdpo_tune.core.errors import LedgerHeldError, NoLocksError

LOCK = "ledger.lock"
"""File of a sweep's directory on which its driver has a lease."""
PROBES = 5
"""Attempts at a lock: `is_locked` may hold it for a moment."""
_HOLDER = re.compile(r"process (\d+) on (.+) since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[-+]\d{4})")
_CLOCK = "%Y-%m-%d %H:%M:%S%z"
"""With the zone, since a container and its host may have different ones."""


def lock_file(file: int, operation: int, path: Path) -> None:
    """Lock an open file with flock(2); the kernel releases it when the file is closed.

    Raises:
        BlockingIOError: another process holds the lock.
        NoLocksError: the file system has none, as Lustre without `-o flock` (mount.lustre(8)).
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise NoLocksError(
            f"{path.parent}: this file system has no locks ({error.strerror})\n    fix: name a "
            "directory of another disk"
        ) from error


class Lease:
    """The exclusive right to write in a directory, held until `release` or the process's end.

    The text of the file only names the holder. Child processes do not inherit the lease.
    """

    def __init__(self, path: Path) -> None:
        """Take the lease; create the directory of the file if it is missing.

        Raises:
            LedgerHeldError: at once, if another live process holds it; the message names it.
            NoLocksError: the disk has no locks.
            OSError: the directory or the file cannot be created.
        """
        self.path, self._file = path, _lock(path)
        since = time.strftime(_CLOCK)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)
        except OSError:  # a full disk; the lock must not stay
            self.release()
            raise

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_locked(path: Path) -> bool:
    """Return whether a live process holds the lock of a file; on a disk without locks none does."""
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        lock_file(file, fcntl.LOCK_SH | fcntl.LOCK_NB, path)
    except BlockingIOError:
        return True
    except NoLocksError:
        return False
    finally:
        os.close(file)
    return False


@dataclass(frozen=True)
class Driver:
    """Last holder of a ledger's lock."""

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
        since = datetime.strptime(found[3], _CLOCK).timestamp()
    except (OSError, ValueError, OverflowError):
        return None
    process, host = int(found[1]), found[2]
    is_here = host == socket.gethostname()
    held = is_locked(lock)
    alive = held if held or is_here else None  # not every shared disk shares locks
    return Driver(process, host, since, alive)


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for _ in range(PROBES - 1):
            with suppress(BlockingIOError):
                lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
                break
            time.sleep(0.01)
        lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    except BlockingIOError:
        holder = os.pread(file, 1024, 0).decode(errors="replace").strip()
        os.close(file)
        raise LedgerHeldError(
            f"{path.parent} is being written by {holder or 'another process'}; "
            "wait for it, stop it, or choose another --name (of a sweep) or --out (of a training)"
        ) from None
    except NoLocksError:
        os.close(file)
        raise
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    os.close(file)  # the last holder has moved the directory between our open and our lock
    return _lock(path)
