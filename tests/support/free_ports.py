"""Ports for servers that are to listen a while after they were chosen."""

from __future__ import annotations

import random
import socket
from contextlib import closing

RANGE = range(20_000, 32_768)
"""Above those that Ray gives its workers, and below those that Linux gives to connections: one of
these would be taken now and then by a connection before the server that was to have it is up."""
_left: list[int] = []
"""Not handed out yet, in an order of this process's own."""


def find_free_port() -> int:
    """One that nothing listens at, and that this process has not handed out before."""
    if not _left:
        _left.extend(random.sample(RANGE, len(RANGE)))
    while True:
        port = _left.pop()
        with closing(socket.socket()) as probe:
            # as servers do: what is left of a connection does not matter
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody else's
                continue
        return port
