"""Access control of the page: its token, the host, the origin, and a limit on wrong tokens.

A browser sends requests to localhost for any web page that it shows. So the token alone is not
enough: the name in `Host` must be one of this machine or named for a proxy (DNS rebinding), and a
change needs a header that other pages cannot send (cross-site request forgery).
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

LOG = logging.getLogger("gdpo_tune.web")
HOST_NAME = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:\d{1,5})?")
"""Name of a host as browsers send it, with a port that is not the scheme's."""
HEADER = "x-gdpo-tune"
"""Header of every request that changes something; a foreign page cannot set it."""
MAX_WRONG, WINDOW = 10, 60.0
"""Wrong tokens of an address within so many seconds, after which it gets status 429."""
MAX_ADDRESSES = 1000
"""Addresses whose wrong tokens are remembered."""
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # plotly sets styles of single elements
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""


class Guard:
    """The token of one server, and the addresses that guess at it."""

    def __init__(
        self,
        token: str,
        names: frozenset[str],
        clock: Callable[[], float] = time.monotonic,
        proxied: frozenset[str] = frozenset(),
    ) -> None:
        """Accept `names` in `Host`, besides addresses and localhost.

        A proxy serves the page as `proxied`: names, with their port where `Origin` has one.
        """
        self.token = token
        # Cookies do not tell ports apart, and several servers may run on one machine.
        self.cookie = f"gdpo_tune_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        self._names = names | {urlsplit(f"//{name}").hostname for name in proxied}
        self._proxied = proxied
        self._clock = clock
        self._wrong: dict[str, deque[float]] = {}

    def is_known_host(self, host: str) -> bool:
        """Return whether a `Host` names this machine; no foreign name can stand for an address."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name == "localhost" or name in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def has_token(self, query: str | None, cookies: Mapping[str, str]) -> bool:
        """Return whether a request has the token, in its address or in its cookie."""
        found = [value for value in (query, cookies.get(self.cookie)) if value]
        return any(secrets.compare_digest(v.encode(), self.token.encode()) for v in found)

    def note_wrong_token(self, address: str) -> int:
        """Log a request without the token, and return the status of its answer: 403 or 429."""
        now = self._clock()
        if address not in self._wrong and len(self._wrong) >= MAX_ADDRESSES:
            self._wrong.pop(next(iter(self._wrong)))
        times = self._wrong.setdefault(address, deque(maxlen=MAX_WRONG))
        while times and now - times[0] >= WINDOW:
            times.popleft()
        if len(times) == MAX_WRONG:
            return 429
        times.append(now)
        LOG.warning("refused a request from %s: it has no valid token", address)
        if len(times) == MAX_WRONG:
            LOG.warning("too many of them from %s: it is told to wait %.0f s", address, WINDOW)
        return 403

    def may_change(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request comes from a page of this server."""
        scheme, _, name = headers.get("origin", "").partition("://")
        is_own = name in (headers.get("host"), *self._proxied)
        is_downgraded = headers.get("x-forwarded-proto") == "https" != scheme
        return HEADER in headers and ("origin" not in headers or (is_own and not is_downgraded))


def list_own_names(host: str) -> frozenset[str]:
    """Return the names under which this machine may be reached, for a server on `host`."""
    if is_loopback(host):
        return frozenset()
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn()))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
