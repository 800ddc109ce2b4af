"""Where a service is, which way leads there, and what of that may be shown."""

from __future__ import annotations

import base64
import urllib.parse
import urllib.request
from dataclasses import dataclass

from ..core.errors import SandboxUnavailable
from ..core.service_url import split_service_url

_PATH = "/run_code"
_NO_PROXY = "url: the environment's proxy is malformed"


@dataclass(frozen=True)
class Proxy:
    """A machine of the environment's choice that passes requests on."""

    host: str
    port: int
    headers: dict[str, str]


@dataclass(frozen=True)
class Address:
    """Where a service is, and the part of that which may be shown."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query of `run_code`."""
    authorization: str
    proxy: Proxy | None
    """The environment's proxy for this address; none if it is this machine."""

    @property
    def shown(self) -> str:
        """The address without credentials, path and query."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `http[s]://[user:password@]host[:port][/path]`, with or without `/run_code`.

        Raises:
            SandboxUnavailable: it is no such address, or the environment's proxy is none; the
                message shows nothing of either, because they may hold credentials.
        """
        try:
            parts = split_service_url(url)
        except ValueError as error:
            raise SandboxUnavailable(f"url: the service's address is malformed: {error}") from None
        path = parts.path.rstrip("/")
        path = path if path.endswith(_PATH) else path + _PATH
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(
            parts.scheme,
            host,
            port,
            path + (f"?{parts.query}" if parts.query else ""),
            _basic(parts),
            _find_proxy(parts.scheme, host, port),
        )


def _find_proxy(scheme: str, host: str, port: int) -> Proxy | None:
    if host in ("localhost", "::1") or host.startswith("127."):
        return None
    if urllib.request.proxy_bypass(f"{host}:{port}"):
        return None
    url = urllib.request.getproxies().get(scheme)
    if not url:
        return None
    try:
        parts = split_service_url(url if "://" in url else f"http://{url}")
    except ValueError:
        raise SandboxUnavailable(_NO_PROXY) from None
    credentials = _basic(parts)
    headers = {"Proxy-Authorization": credentials} if credentials else {}
    return Proxy(parts.hostname or "", parts.port or 80, headers)


def _basic(parts: urllib.parse.SplitResult) -> str:
    if parts.username is None:
        return ""
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")
