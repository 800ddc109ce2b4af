"""Messages between the processes of the sandbox.

Most are frames: a length of four bytes, then the payload. A zygote's requests and answers have a
fixed size instead.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import NamedTuple

HEADER = struct.Struct("=I")
READY = HEADER.pack(0)
"""The empty frame: a fork sends it once it is locked, before it reads its job."""
PRINTED = b">"
"""First byte of a frame of printed bytes; every other frame is JSON."""


class Allowance(NamedTuple):
    """Limits of one fork; as a message, the request for it."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    file_bytes: int = 0
    """Most bytes of a file; with 0 the fork has no files."""

    FORMAT = struct.Struct("=ddQQ")


class Ending(NamedTuple):
    """How the process of a candidate, or of its tests, ended; the answer to a request."""

    signal: int
    """The signal that ended it, by Linux's numbers; 0 after an exit."""
    timed_out: bool
    """True if it was killed at a limit of its clocks."""
    cpu_seconds: float
    peak_bytes: int

    FORMAT = struct.Struct("=i?dQ")


class FrameTooLong(Exception):
    """A header that announces more than the receiver takes."""


def pack(payload: bytes) -> bytes:
    """Put the length in front of a payload."""
    return HEADER.pack(len(payload)) + payload


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_exactly(receive: Callable[[int], bytes], count: int) -> bytes:
    """Call `receive(at_most)` until `count` bytes have arrived.

    Raises:
        EOFError: the sender has closed before that.
    """
    chunks: list[bytes] = []
    while count:
        chunk = receive(count)
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def read_frame(receive: Callable[[int], bytes], limit: int) -> bytes:
    """Read one frame and return its payload.

    Raises:
        EOFError: the sender has closed.
        FrameTooLong: the payload is longer than `limit` bytes; it is not read.
    """
    (length,) = HEADER.unpack(read_exactly(receive, HEADER.size))
    if length > limit:
        raise FrameTooLong
    return read_exactly(receive, length)
