"""One connection to a SandboxFusion-style service: a job goes out, a response comes back.

Source: bytedance/SandboxFusion, `sandbox/server/sandbox_api.py` and `sandbox/runners/`, for the
fields and for what they mean.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import math
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any

from ..core.errors import SandboxUnavailable
from .address import Address
from .jobs import Limits

CONNECT_SECONDS = 10.0
_CHUNK = 1 << 16
_MAX_QUOTED = 200
_JSON_OVERHEAD = 6
"""Bytes of JSON that one byte of output can become: an escaped control character."""
_MAX_REST = 1 << 20
"""Bytes of a response besides the program's standard output."""
_RETRIED = frozenset((408, 429))
"""Statuses below 500 that say that the moment is wrong and not the request."""


class ServiceFault(Exception):
    """No answer that says anything about the job: to be tried again."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class ResponseTooLong(Exception):
    """A response longer than what a program within its allowance can cause."""


@dataclass(frozen=True)
class Execution:
    """What a service says of one run of a program."""

    timed_out: bool
    return_code: int
    seconds: float
    """Wall time: the service tells no other."""
    stdout: str
    stderr: str


class Service:
    """One kept-alive connection; used by one thread at a time, interrupted by any."""

    def __init__(self, address: Address, grace: float) -> None:
        self._address = address
        self._grace = grace
        self._connection: http.client.HTTPConnection | None = None
        self._target = address.target
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if address.authorization:
            self._headers["Authorization"] = address.authorization

    def execute(self, program: str, stdin: str, limits: Limits) -> Execution:
        """Run a Python program there.

        Args:
            program: its text.
            stdin: what it reads.
            limits: what it may use, of which the service is told wall time and memory.

        Raises:
            ServiceFault: there is no answer, or none that says anything about the program.
            ResponseTooLong: it printed far more than allowed.
            SandboxUnavailable: the service refuses such requests, whoever asks how often.
        """
        request = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": limits.wall_seconds,
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": math.ceil(limits.memory_bytes / (1 << 20)),
            "files": {},
            "fetch_files": [],
        }
        deadline = time.monotonic() + limits.wall_seconds + self._grace
        limit = _JSON_OVERHEAD * limits.output_bytes + _MAX_REST
        # NOTE: the timeout of a socket starts again with every byte, and so headers may never end.
        watchdog = threading.Timer(deadline - time.monotonic(), self.interrupt)
        watchdog.start()
        try:
            body = self._exchange(json.dumps(request).encode(), deadline, limit)
        except ssl.SSLCertVerificationError as error:
            raise SandboxUnavailable(f"{self._address.shown}: {error}") from error
        except TimeoutError as error:
            raise ServiceFault("no answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            late = time.monotonic() >= deadline
            reason = "no answer in time" if late else f"{type(error).__name__}: {error}"
            raise ServiceFault(reason) from error
        finally:
            watchdog.cancel()
            # NOTE: if it is about to interrupt, then this request and not the next one.
            watchdog.join()
        return _read(body)

    def interrupt(self) -> None:
        """Let a request that is under way fail at once; from any thread."""
        connection = self._connection
        if connection is not None and (channel := connection.sock) is not None:
            try:
                channel.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is closed, which is what was wanted

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, request: bytes, deadline: float, limit: int) -> bytes:
        kept = self._connection is not None
        complete = False
        try:
            try:
                response = self._send(request, deadline)
            except (ConnectionError, http.client.BadStatusLine):
                if not kept:
                    raise
                # NOTE: the service had closed a connection that lay idle; running twice is safe.
                self.close()
                response = self._send(request, deadline)
            # NOTE: one that ends its connection alone holds the socket.
            with response:
                body = self._receive(response, deadline, limit)
            self._refuse_status(response, body)
            complete = not response.will_close
            return body
        finally:
            if not complete:
                self.close()

    def _send(self, request: bytes, deadline: float) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection, self._target = self._connect()
        connection = self._connection
        if connection.sock is None:
            connection.timeout = min(CONNECT_SECONDS, _seconds_until(deadline))
            connection.connect()
        _wait_until(connection, deadline)
        connection.request("POST", self._target, request, self._headers)
        return connection.getresponse()

    def _receive(self, response: http.client.HTTPResponse, deadline: float, limit: int) -> bytes:
        connection = self._connection
        body = bytearray()
        while len(body) <= limit:
            if connection is not None:
                _wait_until(connection, deadline)
            chunk = response.read1(_CHUNK)
            if not chunk:
                if response.length:
                    raise http.client.IncompleteRead(bytes(body), response.length)
                return bytes(body)
            body += chunk
        if response.status == 200 and "json" in response.headers.get("Content-Type", ""):
            raise ResponseTooLong
        raise ServiceFault(f"too long an answer: HTTP {response.status}, more than {limit} bytes")

    def _refuse_status(self, response: http.client.HTTPResponse, body: bytes) -> None:
        status = response.status
        if status == 200:
            return
        reason = f"HTTP {status} {response.reason}"
        if status in _RETRIED or status >= 500:
            raise ServiceFault(reason, _seconds_of(response.headers.get("Retry-After", "")))
        if 300 <= status < 400:
            raise SandboxUnavailable(
                f"{self._address.shown}: {reason}: redirects are not followed; name the target"
            )
        if 400 <= status < 500:
            raise SandboxUnavailable(f"{self._address.shown}: {reason}: {quote(body)}")
        raise ServiceFault(f"{reason} instead of 200")

    def _connect(self) -> tuple[http.client.HTTPConnection, str]:
        address = self._address
        proxy = address.proxy
        host, port = (address.host, address.port) if proxy is None else (proxy.host, proxy.port)
        if address.scheme == "https":
            secure = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS)
            if proxy is not None:
                secure.set_tunnel(address.host, address.port, proxy.headers)
            return secure, address.target
        plain = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        if proxy is None:
            return plain, address.target
        self._headers.update(proxy.headers)
        return plain, address.shown + address.target


def quote(body: bytes | str) -> str:
    """The beginning of a foreign text on one line, for a message."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "..."


def _seconds_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _wait_until(connection: http.client.HTTPConnection, deadline: float) -> None:
    left = _seconds_until(deadline)
    # NOTE: a response that ends its connection takes the socket along and keeps its timeout.
    if connection.sock is not None:
        connection.sock.settimeout(left)


def _seconds_of(retry_after: str) -> float:
    """Seconds that a service asks to wait: a number, or a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _read(body: bytes) -> Execution:
    try:
        response = json.loads(body)
    except (ValueError, RecursionError):
        raise ServiceFault(f"an answer that is no JSON: {quote(body)}") from None
    try:
        status, run = response["status"], response["run_result"]
        if status not in ("Success", "Failed") or run is None:
            reason = response.get("message") or response.get("compile_result") or status
            raise ServiceFault(f"the service failed: {quote(str(reason))}")
        return _read_run(run)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        raise ServiceFault(f"an answer of another form: {quote(body)}") from None


def _read_run(run: dict[str, Any]) -> Execution:
    status = run["status"]
    if status not in ("Finished", "TimeLimitExceeded"):
        raise ServiceFault(f"the service failed: {quote(str(run.get('stderr') or status))}")
    timed_out = status == "TimeLimitExceeded"
    code = 0 if timed_out else int(run["return_code"])
    texts = [run.get("stdout") or "", run.get("stderr") or ""]
    seconds = float(run.get("execution_time") or 0.0)
    if not all(isinstance(text, str) for text in texts) or not math.isfinite(seconds):
        raise TypeError
    return Execution(timed_out, code, max(0.0, seconds), *texts)
