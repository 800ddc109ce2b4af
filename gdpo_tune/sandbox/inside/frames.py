"""Messages between the processes of the sandbox: a length of four bytes, then the payload."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

HEADER = struct.Struct("=I")
READY = HEADER.pack(0)
"""The empty frame: a fork tells that it is locked, before it looks at its job."""


class FrameTooLong(Exception):
    """The header announces more than the receiver takes."""


def pack(payload: bytes) -> bytes:
    """Put the length in front."""
    return HEADER.pack(len(payload)) + payload


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, however many calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_exactly(receive: Callable[[int], bytes], count: int) -> bytes:
    """Call `receive(at_most)` until `count` bytes are there.

    Raises:
        EOFError: the sender has gone before.
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
    """Read one frame.

    Raises:
        EOFError: the sender has gone.
        FrameTooLong: the payload is longer than `limit` bytes; it is not read.
    """
    (length,) = HEADER.unpack(read_exactly(receive, HEADER.size))
    if length > limit:
        raise FrameTooLong
    return read_exactly(receive, length)
