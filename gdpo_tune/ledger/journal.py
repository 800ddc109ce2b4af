"""The ledger's file: one record a line, appended by one process at a time.

Optuna's own file backend never opens again after a crash has torn a write, because the next record
follows the torn one. And its lock file survives `kill -9`, and then blocks for 30 seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend

from gdpo_tune.core.errors import GdpoTuneError, UsageError
from gdpo_tune.core.locks import Lease

DAMAGED_FIX = (
    "damaged; restore it from a copy, or move the sweep aside and begin again with --fresh"
)


def archive_directory(lease: Lease) -> tuple[Lease, Path]:
    """Rename the directory of a lease; return the lease on a new one, and the path of the old."""
    directory = lease.path.parent
    first = directory.with_name(f"{directory.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(1))
    aside = next(path for path in itertools.chain([first], others) if not path.exists())
    try:
        directory.rename(aside)
    except OSError as error:  # rename(2): EBUSY or EXDEV for a mount point
        reason = "a mount point" if os.path.ismount(directory) else error.strerror
        raise UsageError(
            f"--fresh cannot move {directory} aside: {reason}\n"
            "    fix: choose another --name, or move what is in it away"
        ) from error
    lease.release()
    return Lease(lease.path), aside


def truncate_torn_write(path: Path) -> int:
    """Cut a torn write off the end of a journal, under its lease; return the bytes dropped.

    `Journal.read_logs` finds damage before the end, which no torn write explains.
    """
    content = path.read_bytes()
    keep = content.rfind(b"\n") + 1
    while keep and _decode(content[content.rfind(b"\n", 0, keep - 1) + 1 : keep]) is None:
        keep = content.rfind(b"\n", 0, keep - 1) + 1
    if keep < len(content):
        os.truncate(path, keep)
    return len(content) - keep


def _intern_strings(mapping: dict[str, Any]) -> dict[str, Any]:
    intern = sys.intern  # a journal repeats a few strings
    return {
        intern(key): intern(value) if isinstance(value, str) else value
        for key, value in mapping.items()
    }


DECODER = json.JSONDecoder(object_hook=_intern_strings)


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = DECODER.decode(line.decode())
    except ValueError:  # a power loss may leave a block of zeros, not only a short line
        return None
    return record if isinstance(record, dict) and "op_code" in record else None


class Journal(BaseJournalBackend):
    """Records of one file, for Optuna's `JournalStorage`; reading refuses a damaged one.

    A reader ignores a record whose end is not written yet.
    """

    def __init__(
        self, path: Path, *, read_only: bool, copy: Callable[[], None] = lambda: None
    ) -> None:
        """`copy` is called once records are on the disk."""
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._file = os.open(path, flags, 0o644)
        self.path = path
        self._copy, self._is_batch_open = copy, False
        self._offsets = [0]
        """Position in the file of each record, and of the next one, in bytes."""

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the records from number `log_number_from` on."""
        offset = self._offsets[log_number_from]
        unread = os.fstat(self._file).st_size - offset
        if unread <= 0:
            return
        *lines, _ = os.pread(self._file, unread, offset).split(b"\n")  # the last one has no end yet
        for number, line in enumerate(lines, log_number_from + 1):
            offset += len(line) + 1
            if number == len(self._offsets):
                self._offsets.append(offset)
            record = _decode(line)
            if record is None:
                raise UsageError(
                    f"{self.path}:{number}: this line is not a record of a ledger, so the file is "
                    f"{DAMAGED_FIX}"
                )
            yield record

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records; unless a batch is open, wait until the disk has them.

        Raises:
            OSError: the disk is full or broken; the file is as it was before.
        """
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        before = os.fstat(self._file).st_size
        try:
            while lines:  # the second write of what is left says why the first was short
                lines = lines[os.write(self._file, lines) :]
            if not self._is_batch_open:
                self._flush()
        except OSError:
            os.ftruncate(self._file, before)
            raise

    @contextmanager
    def write_batch(self) -> Generator[None]:
        """Make all records that are appended in the block durable at once, at its end."""
        self._is_batch_open = True
        try:
            yield
        finally:
            self._is_batch_open = False
            self._flush()

    def _flush(self) -> None:
        os.fsync(self._file)
        self._copy()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_storage(journal: Journal) -> JournalStorage:
    """Return the Optuna storage that the records of a journal build.

    Raises:
        UsageError: a line is not a record, Optuna cannot replay one, or the first ones are gone.
    """
    try:
        storage = JournalStorage(journal)
    except (GdpoTuneError, OSError):
        raise
    except Exception as error:  # Optuna's replay states no errors
        raise UsageError(
            f"{journal.path}: Optuna cannot replay its records ({type(error).__name__}: {error}), "
            f"so another version of it wrote them, or the file is {DAMAGED_FIX}"
        ) from error
    if not storage.get_all_studies() and any(journal.read_logs(0)):
        # Optuna skips records of an unknown study, so the sweep would silently begin again.
        raise UsageError(
            f"{journal.path}: its first record, with which a sweep begins, is gone, so it is "
            f"{DAMAGED_FIX}"
        )
    return storage
