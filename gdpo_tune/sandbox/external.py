"""`ExternalSandbox`: candidates run on a service with a SandboxFusion-style `POST /run_code`."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import io
import itertools
import json
import math
import os
import random
import secrets
import ssl
import threading
import time
import urllib.parse
import urllib.request
from asyncio import sleep
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from ..core.addresses import split_service_url
from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from .guest.grading import CandidateReport, grade_frames, grade_output, grade_value
from .guest.protocol import PRINTED, ExitStatus, decode, dump, pack_frame, parse
from .jobs import (
    Call,
    Job,
    Limits,
    Result,
    Sandbox,
    SandboxInfo,
    Stream,
    conclude,
    encode_tests,
    name_in_errors,
)

_ATTEMPTS = 3
"""How often a job is sent before a fault of the service is raised."""
_GRACE_SECONDS = 30.0
"""Seconds to wait for a response beyond the time that a job may take."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_LONGEST_REQUESTED_PAUSE = 60.0
"""Most seconds of a service's `Retry-After` that are obeyed."""
_CHECK_SECONDS = 10.0


class ExternalSandbox(Sandbox):
    """Runs untrusted Python on the machines of a service; a context manager.

    The service decides how well candidates are isolated. Code and inputs leave this machine.
    Expected values stay, and results are compared here, so a forged result is only a value.
    Differences to `CodeSandbox`:

    - The clock is `Limits.wall_seconds` for one run of the interpreter there: all calls and
      asserts of a job, or one stream. `Result.cpu_seconds` is the wall time that it reports.
    - Asserts are `assert f(literals) == literal` alone; others need a checker beside the judge.
    - SandboxFusion passes on some 128 KiB of output; more is status `output`.
    - A process killed by SIGKILL counts as `memory`, because services end such processes so.

    `url` is that of `Service`; at most `workers` requests are sent at once.

    Raises:
        SandboxUnavailable: a small job did not pass; the message names address and reason.
    """

    def __init__(self, url: str, workers: int = 4) -> None:
        if workers < 1:
            raise ValueError("workers must be positive")
        super().__init__()
        self._service = Service(url)
        self._shown = self._service.shown
        self._slots = asyncio.Semaphore(workers)
        # NOTE: its own generator, because pauses must not change what training draws.
        self._jitter = random.Random()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="external", daemon=True)
        self._thread.start()
        self.info = SandboxInfo("external", (self._shown,))
        try:
            limits = Limits(wall_seconds=_CHECK_SECONDS)
            job = Job("def double(x): return 2 * x", (Call("double", (21,), 42),), limits=limits)
            [result] = self.run_batch([job])
            if not result.passed:
                raise SandboxUnavailable(
                    f"{self._shown}: a job that should pass came back as {result.status}: "
                    f"{result.untrusted_detail or 'a wrong value'}"
                )
        except SandboxInfraError as error:
            self.close()
            raise SandboxUnavailable(str(error)) from error
        except BaseException:
            self.close()
            raise

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in its own process on the service; return one result per job, in order.

        Raises:
            SandboxInfraError: the service failed repeatedly; no job gets a verdict then.
            SandboxUnavailable: the service refuses the request itself (HTTP 4xx).
            ValueError, TypeError: this sandbox is closed; or, before anything is sent, a test is
                not a plain call, or holds a value that cannot be sent.
            RuntimeError: this is a fork of the process that made this sandbox.
        """
        self._require_open()
        remote_jobs: list[RemoteJob] = []
        for index, job in enumerate(jobs):
            with name_in_errors(f"job {index}"):
                remote_jobs.append(RemoteJob(job))
        with self._submitting:
            self._require_open()
            tasks = [
                asyncio.run_coroutine_threadsafe(self._run_job(job), self._loop)
                for job in remote_jobs
            ]
        try:
            done = wait(tasks, return_when=FIRST_EXCEPTION).done
            for task in done:
                task.result()
            return [task.result() for task in tasks]
        except CancelledError:
            raise SandboxInfraError(f"{self._shown}: closed before a job had its verdict") from None
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Cancel every request and close every connection; idempotent, and from any thread."""
        if os.getpid() != self._owner:
            return
        with self._submitting:
            if not self._closed:
                asyncio.run_coroutine_threadsafe(self._stop_loop(), self._loop)
            self._closed = True
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop_loop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._service.close()
        self._loop.stop()

    async def _run_job(self, job: RemoteJob) -> Result:
        async with self._slots:
            try:
                for stream in job.streams:
                    if not (job.report.stop or job.ending.signal or job.ending.timed_out):
                        await self._execute(job, stream)
                return job.conclude()
            except GdpoTuneError:
                raise
            except Exception as error:
                raise SandboxInfraError(f"unforeseen error in the sandbox: {error!r}") from error

    async def _execute(self, job: RemoteJob, stream: Stream | None) -> None:
        stdin = stream.stdin if stream else ""
        for attempt in itertools.count(1):
            try:
                job.add(stream, await self._service.execute(job.program, stdin, job.limits))
                return
            except ServiceFault as fault:
                if attempt == _ATTEMPTS:
                    reason = f"{self._shown}: no verdict in {attempt} attempts: {fault}"
                    raise SandboxInfraError(reason) from fault
                pause = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
                pause *= self._jitter.uniform(0.5, 1.0)
                await sleep(max(pause, min(fault.retry_after, _LONGEST_REQUESTED_PAUSE)))


STALL_BYTES = 128 << 10
"""Output that SandboxFusion reads while a program runs. One that prints more waits for a reader
until its time is up, or ends without the rest."""
SENT_MODULES = ("protocol", "untrusted")
"""Modules of `guest/` that a program brings along, in the order of imports; the last one runs."""
_SIGNALS = 64

_BOOT = """import sys
import types

package = types.ModuleType("sandbox_inside")
package.__path__ = []
sys.modules["sandbox_inside"] = package
for name, source in {sources!a}.items():
    module = types.ModuleType("sandbox_inside." + name)
    module.__package__ = "sandbox_inside"
    sys.modules[module.__name__] = module
    exec(compile(source, name, "exec"), module.__dict__)
module.run_remotely(
"""


@cache
def _load_boot_code() -> str:
    directory = Path(__file__).parent / "guest"
    sources = {name: (directory / f"{name}.py").read_text("utf-8") for name in SENT_MODULES}
    return _BOOT.format(sources=sources)


class RemoteJob:
    """A job for a service: its program, and the verdicts as they come back.

    The program runs once for all calls and asserts together, or once per stream.

    Raises:
        ValueError, TypeError: see `encode_tests`; or a test is not a plain call.
    """

    def __init__(self, job: Job) -> None:
        self.limits = job.limits
        share = job.limits.test_cpu_seconds / job.limits.cpu_seconds
        if job.streams and share < 1:
            self.limits = replace(job.limits, wall_seconds=job.limits.wall_seconds * share)
        self.comparison = job.comparison
        self.streams = job.streams or (None,)
        """One per run of the program; None for the run that makes the calls."""
        self.nonce = secrets.token_hex(16)
        self.report = CandidateReport(started=True)
        tests = encode_tests((*job.calls, *job.asserts))
        for number, (kind, source, *_) in enumerate(tests):
            if kind == "assert":
                raise ValueError(
                    f"test {number}: a service cannot run this test, because such tests run "
                    f"beside the judge: {source!r}; write a Call or "
                    "`assert f(literals) == literal`, or use the local sandbox"
                )
        calls = [[function, arguments] for _, function, arguments, _ in tests]
        self._expected: list[Any] = decode(parse(dump([expected for *_, expected in tests])))
        self._tests = len(tests) + len(job.streams)
        request = dump([self.nonce, job.code, job.seed, job.limits.output_bytes, calls or None])
        self.program = f"{_load_boot_code()}{request.decode()!a})\n"
        # NOTE: a frame of printed bytes has one byte more.
        self._output_left = job.limits.output_bytes + len(job.streams)
        self.ending = ExitStatus(0, False, 0.0, job.limits.memory_bytes)

    def conclude(self) -> Result:
        """Return the result."""
        return conclude(self.report, self.ending, self._tests, self.limits)

    def add(self, stream: Stream | None, execution: Execution | None) -> None:
        """Record the verdicts of one run; None is a run that printed far more than allowed.

        Raises:
            ServiceFault: nothing shows that the program started, so nothing is known.
        """
        report = self.report
        if execution is None:
            report.stop = "output"
            return
        answer = self._extract_answer(execution)
        is_stalled = len(execution.stdout) >= STALL_BYTES
        code = execution.return_code  # as Python has it after a signal, or as a shell
        signal = -code if code < 0 else code - 128
        self.ending = ExitStatus(
            signal if 0 < signal <= _SIGNALS and not execution.timed_out else 0,
            execution.timed_out and not is_stalled,
            self.ending.cpu_seconds + execution.seconds,
            self.ending.peak_bytes,
        )
        if stream is None:
            prefix = f"{self.nonce} ".encode()
            # NOTE: not the text after the last line's end, which is a frame that was cut off.
            lines = answer.split(b"\n")[:-1]
            frames = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
            self._grade(frames, self._expected, partial(grade_value, rule=self.comparison))
            if execution.return_code and report.stop is None:
                report.stop = "ended"
        elif execution.timed_out or self.ending.signal:
            report.stop = "ended"
        elif execution.return_code:
            error, _, text = _get_last_line(execution.stderr).partition(": ")
            report.add("error", error, text)
        else:
            grade = partial(grade_output, rule=self.comparison)
            self._grade([PRINTED + answer], [(stream.expected, stream.tolerance)], grade)
        if is_stalled and report.stop == "ended":
            report.stop = "output"

    def _grade(
        self,
        frames: list[bytes],
        expected: list[Any],
        grade: Callable[[Any, bytes, CandidateReport], None],
    ) -> None:
        answer = io.BytesIO(b"".join(map(pack_frame, frames)))
        grade_frames(answer.read, expected, self._output_left, self.report, grade)
        self._output_left -= sum(map(len, frames))

    def _extract_answer(self, execution: Execution) -> bytes:
        _, sign, answer = execution.stdout.partition(f'{self.nonce} ["begin"]\n')
        if sign:
            return answer.encode("utf-8", "surrogatepass")
        if execution.stdout.startswith("[DecodeError]"):
            # NOTE: output that is not text: no honest frame, and nothing that a test expects.
            return self.nonce.encode() + b" \xff\n"
        # NOTE: the sign comes before any code of the candidate, which cannot withhold it.
        how = "timed out" if execution.timed_out else f"return code {execution.return_code}"
        text = _get_last_line(execution.stderr) or execution.stdout
        raise ServiceFault(f"the program was not started: {how}: {quote(text)}")


def _get_last_line(text: str) -> str:
    return (text.rstrip().splitlines() or [""])[-1]


_PATH = "/run_code"
_MAX_QUOTED = 200
_JSON_OVERHEAD = 6
"""Bytes of JSON that one byte of output can become: an escaped control character."""
_MAX_REST = 1 << 20
"""Bytes of a response besides the program's standard output."""
_RETRIED = frozenset((408, 429))
"""Statuses below 500 after which the same request may succeed later."""


class ServiceFault(Exception):
    """No response, or one that says nothing about the job; the request is retried."""

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

    `url` is `http[s]://[user:password@]host[:port][/path]`, with or without `/run_code` at the end.
    Credentials are sent and never shown. Proxies of the environment are used, except for this
    machine.

    Raises:
        SandboxUnavailable: the address, or the environment's proxy, is malformed.
    """

    def __init__(self, url: str) -> None:
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
        # NOTE: not a client, which would log each address with its query, follow cookies, and
        # trust other certificates than this machine.
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(),
            proxy=_find_proxy(parts.scheme, host, port),
            limits=httpx.Limits(keepalive_expiry=None),
            trust_env=False,
        )

    async def execute(self, program: str, stdin: str, limits: Limits) -> Execution | None:
        """Run a Python program on the service; None if it printed far more than allowed.

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
        seconds = limits.wall_seconds + _GRACE_SECONDS
        # NOTE: ends first, because httpcore closes no socket of a handshake that is cancelled.
        timeouts = {"timeout": {"connect": min(10.0, seconds / 2)}}
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
        status = response.status_code
        reason = f"HTTP {status} {response.reason_phrase}"
        if 300 <= status < 500 and status not in _RETRIED:
            told = "redirects are not followed; name the target"
            cause = told if status < 400 else quote(body or b"")
            raise SandboxUnavailable(f"{self.shown}: {reason}: {cause}")
        if status != 200:
            pause = _read_seconds(response.headers.get("Retry-After", ""))
            raise ServiceFault(f"{reason} instead of 200", pause)
        return None if body is None else _read_execution(body)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


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
