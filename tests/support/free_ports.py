"""Free ports for servers that start to listen some time later."""

from __future__ import annotations

import random
import socket
from contextlib import closing

RANGE = range(20_000, 32_768)
"""Above the ports of Ray's workers and below the ports that Linux gives to outgoing connections.

Such a connection could otherwise take the port before the server listens."""
_left: list[int] = []
"""Ports that were not handed out yet, in random order."""


def find_free_port() -> int:
    """Find a port without a listener that this process has not handed out before."""
    if not _left:
        _left.extend(random.sample(RANGE, len(RANGE)))
    while True:
        port = _left.pop()
        with closing(socket.socket()) as probe:
            # as servers do, so that closed connections do not block the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # another process listens there
                continue
        return port
