"""What is to be sent, kept in a file until it is sent: a queue that outlives the process.

The driver appends one JSON line a message; one thread delivers batches of them and notes how far
it came. Neither a slow server nor a dead one reaches the driver, and whatever is left when the
process ends is sent the next time. Delivery is at least once, so messages must bear repetition.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gdpo_tune.core.files import write_whole

Message = dict[str, Any]
"""One JSON object; `gdpo_tune.tracking.run_content` says what it holds."""

BATCH_BYTES = 1 << 20


class Spool:
    """An append-only file of messages beside a small file that says how many were delivered.

    One process writes. A line that a crash cut short is dropped when the file is opened; a
    position that belongs to another destination counts as nothing delivered.

    Args:
        path: the JSONL file; the position lies beside it with the suffix `.offset`.
        destination: names the receiver, such as a tracking URI; it is kept as a hash, because a
            URI may hold a password.
    """

    def __init__(self, path: Path, destination: str) -> None:
        self.path = path
        self.refused_path = path.with_suffix(".refused.jsonl")
        self._destination = hashlib.sha256(destination.encode()).hexdigest()
        self._position = path.with_suffix(".offset")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._size = _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self.offset = 0
        """Bytes of the file that are delivered."""
        self.leftover: list[Message] = []
        """Messages before the offset that could not be placed, to be tried again."""
        self._load_position()
        self._put = sum(1 for _ in _lines(path, self.offset, self._size))
        """Messages since the offset at which this file was opened. The driver alone writes it."""
        self._taken = 0
        """How many of these are delivered. The sending thread alone writes it."""

    def put(self, message: Message) -> None:
        """Append `message`; from here on it survives the end of this process.

        Raises:
            ValueError: the message holds NaN or inf.
        """
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._file.write(line)
        self._size += len(line)
        self._put += 1

    def pending(self) -> int:
        """How many messages are not delivered yet; costs no disk access."""
        return len(self.leftover) + self._put - self._taken

    def is_drained(self) -> bool:
        """Whether everything is delivered."""
        return self.offset >= self._size and not self.leftover

    def messages(self) -> Iterator[Message]:
        """Every message, oldest first."""
        return _parsed(_lines(self.path, 0, self._size))

    def delivered(self) -> Iterator[Message]:
        """Every message that was delivered, oldest first."""
        return _parsed(_lines(self.path, 0, self.offset))

    def batch(self) -> tuple[list[Message], int]:
        """The next messages, about a MiB of them, and the offset after them."""
        lines: list[bytes] = []
        length = 0
        for line in _lines(self.path, self.offset, self._size):
            lines.append(line)
            length += len(line)
            if length >= BATCH_BYTES:
                break
        return list(_parsed(lines)), self.offset + length

    def commit(self, offset: int, leftover: list[Message]) -> None:
        """Note that everything before `offset` is delivered, except `leftover`."""
        if (offset, leftover) == (self.offset, self.leftover):
            return
        self._taken += sum(1 for _ in _lines(self.path, self.offset, offset))
        self.offset, self.leftover = offset, leftover
        position = {"destination": self._destination, "offset": offset, "leftover": leftover}
        write_whole(self._position, json.dumps(position))

    def set_aside(self, message: Message, reason: str) -> None:
        """Keep a message that the receiver refuses in a file of its own."""
        with self.refused_path.open("a") as file:
            file.write(json.dumps({"reason": reason, "message": message}) + "\n")

    def move_aside(self) -> None:
        """Close the file and free its name; it is about a sweep that is no more."""
        self.close()
        self.path.replace(self.path.with_suffix(".old.jsonl"))
        self._position.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; what is pending stays in it."""
        self._file.close()

    def _load_position(self) -> None:
        try:
            position = json.loads(self._position.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return
        if not isinstance(position, dict):
            return  # a damaged file: everything is sent again, and nothing twice
        if position["destination"] == self._destination:
            self.offset = min(position["offset"], self._size)
            self.leftover = position["leftover"]


def _cut_torn_line(path: Path) -> int:
    """Truncate the file after its last newline and return its size in bytes."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:  # from its end: a long sweep's file is as long
            start = max(0, end - BATCH_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
    return end


def _lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Lines of the file from byte `start` up to byte `end`."""
    if start >= end:
        return
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            line = file.readline()
            start += len(line)
            yield line


def _parsed(lines: Iterable[bytes]) -> Iterator[Message]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            # A power cut may leave blocks of zeros inside the file; what follows them is whole.
            continue
