"""Messages between the processes of the sandbox: a length of four bytes, then the payload."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

HEADER = struct.Struct("=I")
READY = HEADER.pack(0)
"""The empty frame: a fork sends it once it is locked, before it reads its job."""
PRINTED = b">"
"""First byte of a frame of printed bytes; every other frame is JSON."""


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
