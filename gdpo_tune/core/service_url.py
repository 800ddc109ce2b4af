"""Addresses of web services, as they may stand in a sweep file."""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.parse
import urllib.request

_PLAIN = re.compile(r"[!-~]+")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_LONGEST_NAME = 253


def bypass_proxies_on_loopback() -> None:
    """Let no client of this process and its children ask a proxy for this machine itself."""
    # Not every client reads networks, and Debian gives 127.0.1.1 to the host's own name.
    here = "localhost,127.0.0.1,127.0.1.1,127.0.0.0/8,::1"
    present = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if urllib.request.getproxies_environment() and present != "*" and here not in present:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{here},{present}".rstrip(",")


def split_service_url(url: str) -> urllib.parse.SplitResult:
    """Split `http[s]://[user:password@]host[:port][/path]` into its parts.

    Raises:
        ValueError: it is no such address; the message shows no part of it, because it may hold
            credentials.
    """
    if not _PLAIN.fullmatch(url):
        raise ValueError("blanks, control characters and letters beyond ASCII cannot be in it")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        # NOTE: its message would show what it takes for the port: the half of a password.
        raise ValueError("its host or its port is malformed") from None
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("it must be http[s]://HOST[:PORT]")
    if port == 0:
        raise ValueError("its port must be from 1 to 65535")
    is_name = len(host) <= _LONGEST_NAME and _NAME.fullmatch(host)
    if not (_is_ipv6(host) if ":" in host else is_name):
        raise ValueError("its host is neither a name nor a number")
    return parts


def drop_credentials(url: str) -> str:
    """Return an address without its user and password."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def find_address_problem(address: str, *, query: bool = False) -> str:
    """Return why an address cannot be called, without its password; empty if it can.

    `query` allows a query and a fragment.
    """
    try:
        parts = split_service_url(address)
    except ValueError as error:
        return str(error)
    if parts.username or parts.password:
        return "it has a user or a password, which would not be sent"
    return "it has something behind ? or #" if (parts.query or parts.fragment) and not query else ""


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
