"""HTTP client of a service with a SandboxFusion-style `POST /run_code`.

Source: bytedance/SandboxFusion, `sandbox/server/sandbox_api.py` and `sandbox/runners/`, for the
fields and their meaning.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import json
import math
import ssl
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass

import httpx

from ..core.addresses import split_service_url
from ..core.errors import SandboxUnavailable
from .jobs import Limits

_PATH = "/run_code"
_CONNECT_SECONDS = 10.0
_MAX_QUOTED = 200
_JSON_OVERHEAD = 6
"""Bytes of JSON that one byte of output can become: an escaped control character."""
_MAX_REST = 1 << 20
"""Bytes of a response besides the program's standard output."""
_RETRIED = frozenset((408, 429))
"""Statuses below 500 after which the same request may succeed later."""


class ServiceFault(Exception):
    """A response that says nothing about the job, or none at all; the request is retried."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Execution:
    """One run of a program, as the service reports it."""

    timed_out: bool
    return_code: int
    seconds: float
    """Wall time: the service reports no other."""
    stdout: str
    stderr: str


class Service:
    """Kept-alive connections to one service, for one event loop.

    Args:
        url: `http[s]://[user:password@]host[:port][/path]`, with or without `/run_code`.
        grace: seconds to wait for a response beyond the wall time of the program.

    Raises:
        SandboxUnavailable: the address, or the environment's proxy, is malformed. The message
            shows nothing of either, because they may hold credentials.
    """

    def __init__(self, url: str, grace: float) -> None:
        try:
            parts = split_service_url(url)
        except ValueError as error:
            raise SandboxUnavailable(f"url: the service's address is malformed: {error}") from None
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        """Scheme, host and port: the part of the address that may be shown."""
        path = parts.path.rstrip("/").removesuffix(_PATH) + _PATH
        self._url = self.shown + path + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Accept": "application/json"}
        if parts.username is not None:
            pair = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._grace = grace
        # NOTE: not a client, which would log each address with its query, follow cookies, and
        # trust other certificates than this machine.
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(),
            proxy=_find_proxy(parts.scheme, host, port),
            limits=httpx.Limits(keepalive_expiry=None),
            trust_env=False,
        )

    async def execute(self, program: str, stdin: str, limits: Limits) -> Execution | None:
        """Run a Python program on the service, which gets the limits of wall time and memory.

        Return None if the program printed far more than allowed.

        Raises:
            ServiceFault: there is no response, or it says nothing about the program.
            SandboxUnavailable: the service refuses such requests, so that no retry can help.
        """
        fields = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": limits.wall_seconds,
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": math.ceil(limits.memory_bytes / (1 << 20)),
            "files": {},
            "fetch_files": [],
        }
        seconds = limits.wall_seconds + self._grace
        # NOTE: ends first, because httpcore closes no socket of a handshake that is cancelled.
        timeouts = {"timeout": {"connect": min(_CONNECT_SECONDS, seconds / 2)}}
        request = httpx.Request(
            "POST", self._url, headers=self._headers, json=fields, extensions=timeouts
        )
        limit = _JSON_OVERHEAD * limits.output_bytes + _MAX_REST
        try:
            # NOTE: one clock for the whole exchange: those of httpx start again with every byte.
            async with asyncio.timeout(seconds):
                response = await self._transport.handle_async_request(request)
                body = await _receive(response, limit)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServiceFault("no response in time") from error
        except httpx.HTTPError as error:
            cause = _find_cause(error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise SandboxUnavailable(f"{self.shown}: {cause}") from error
            raise ServiceFault(f"{type(cause).__name__}: {cause}") from error
        self._refuse_status(response, body or b"")
        return None if body is None else _read_execution(body)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    def _refuse_status(self, response: httpx.Response, body: bytes) -> None:
        status = response.status_code
        if status == 200:
            return
        reason = f"HTTP {status} {response.reason_phrase}"
        if 300 <= status < 500 and status not in _RETRIED:
            cause = "redirects are not followed; name the target" if status < 400 else quote(body)
            raise SandboxUnavailable(f"{self.shown}: {reason}: {cause}")
        pause = _read_seconds(response.headers.get("Retry-After", ""))
        raise ServiceFault(f"{reason} instead of 200", pause)


async def _receive(response: httpx.Response, limit: int) -> bytes | None:
    """Receive a body; return None if JSON is longer than `limit` bytes."""
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > limit:
                break
        else:
            return bytes(body)
    finally:
        await response.aclose()
    status = response.status_code
    if status == 200 and "json" in response.headers.get("Content-Type", ""):
        return None
    raise ServiceFault(f"the response is too long: HTTP {status}, more than {limit} bytes")


def _find_proxy(scheme: str, host: str, port: int) -> str | None:
    """Return the environment's proxy for a host; None for this machine."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return None
    url = urllib.request.getproxies().get(scheme)
    if not url or urllib.request.proxy_bypass(f"{host}:{port}"):
        return None
    url = url if "://" in url else f"http://{url}"
    try:
        split_service_url(url)
    except ValueError:
        raise SandboxUnavailable("url: the environment's proxy is malformed") from None
    return url


def quote(body: bytes | str) -> str:
    """Shorten a foreign text to one printable line for a message."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "..."


def _find_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain: httpx says only that a connection failed."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error


def _read_seconds(retry_after: str) -> float:
    """Read the seconds to wait from a number or a date; 0 for anything else."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _read_execution(body: bytes) -> Execution:
    try:
        response = json.loads(body)
    except (ValueError, RecursionError):
        raise ServiceFault(f"the response is not JSON: {quote(body)}") from None
    try:
        status, run = response["status"], response["run_result"]
        if status not in ("Success", "Failed") or run is None:
            reason = response.get("message") or response.get("compile_result") or status
        elif run["status"] not in ("Finished", "TimeLimitExceeded"):
            reason = run.get("stderr") or run["status"]
        else:
            timed_out = run["status"] == "TimeLimitExceeded"
            code = 0 if timed_out else int(run["return_code"])
            texts = [run.get("stdout") or "", run.get("stderr") or ""]
            seconds = float(run.get("execution_time") or 0.0)
            if not all(isinstance(text, str) for text in texts) or not math.isfinite(seconds):
                raise TypeError
            return Execution(timed_out, code, max(0.0, seconds), *texts)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        raise ServiceFault(f"the response has another form: {quote(body)}") from None
    raise ServiceFault(f"the service failed: {quote(str(reason))}")
