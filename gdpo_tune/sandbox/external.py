"""`ExternalSandbox`: candidates run on a service with a SandboxFusion-style `POST /run_code`."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
from asyncio import sleep
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait

from ..core import compute_lock
from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from .jobs import Call, Job, Limits, Result, Sandbox, SandboxInfo, Stream, name_in_errors
from .remote_jobs import RemoteJob
from .service import Service, ServiceFault

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_LONGEST_REQUESTED_PAUSE = 60.0
"""Most seconds of a service's `Retry-After` that are obeyed."""
_CLOSE_SECONDS = 5.0
_CHECK_SECONDS = 10.0


class ExternalSandbox(Sandbox):
    """Runs untrusted Python on the machines of a service; a context manager.

    The service decides how well candidates are isolated. Code and inputs leave this machine.
    Expected values stay, and results are compared here, so a forged result is only a value.
    Differences to `CodeSandbox`:

    - The clock is `Limits.wall_seconds` for one run of the interpreter there: all calls and
      asserts of a job, or one stream. `Result.cpu_seconds` is the wall time that it reports.
    - Asserts are `assert f(literals) == literal` alone; others need a checker beside the judge.
    - The service's Python runs the code, with the packages that are installed there.
    - SandboxFusion passes on some 128 KiB of output; more is status `output`.
    - A process killed by SIGKILL counts as `memory`, because services end such processes so.

    Args:
        url: `http[s]://[user:password@]host[:port][/path]`, with or without `/run_code` at the
            end. Credentials are sent and never shown. Proxies of the environment are used,
            except for this machine.
        workers: most requests at once.
        attempts: how often a job is sent before a fault of the service is raised.
        timeout: seconds to wait for a response beyond the time that a job may take.

    Raises:
        SandboxUnavailable: a small job did not pass; the message names address and reason.
    """

    def __init__(
        self, url: str, workers: int = 4, *, attempts: int = 3, timeout: float = 30.0
    ) -> None:
        if workers < 1 or attempts < 1 or not timeout > 0:
            raise ValueError("workers, attempts and timeout must be positive")
        super().__init__()
        self._service = Service(url, timeout)
        self._shown = self._service.shown
        self._attempts = attempts
        self._slots = asyncio.Semaphore(workers)
        # NOTE: its own generator, because pauses must not change what training draws.
        self._jitter = random.Random()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="external", daemon=True)
        self._thread.start()
        self.info = SandboxInfo("external", (self._shown,))
        try:
            self._check_service()
        except BaseException:
            self.close()
            raise

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in its own process on the service; return one result per job, in order.

        Raises:
            SandboxInfraError: the service failed `attempts` times; no job gets a verdict then.
            SandboxUnavailable: the service refuses the request itself (HTTP 4xx).
            ValueError, TypeError: this sandbox is closed; or, before anything is sent, a test has
                neither `assert` nor `raise`, is not a plain call, or holds a value that cannot be
                sent.
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
            with compute_lock.yield_lock():
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
        self._thread.join(_CLOSE_SECONDS)

    def _check_service(self) -> None:
        limits = Limits(wall_seconds=_CHECK_SECONDS)
        job = Job("def double(x): return 2 * x", (Call("double", (21,), 42),), limits=limits)
        try:
            [result] = self.run_batch([job])
        except SandboxInfraError as error:
            raise SandboxUnavailable(str(error)) from error
        if not result.passed:
            raise SandboxUnavailable(
                f"{self._shown}: a job that should pass came back as {result.status}: "
                f"{result.untrusted_detail or 'a wrong value'}"
            )

    def _run_loop(self) -> None:
        self._loop.run_forever()
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
                    if not job.is_decided:
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
                if attempt == self._attempts:
                    reason = f"{self._shown}: no verdict in {attempt} attempts: {fault}"
                    raise SandboxInfraError(reason) from fault
                await sleep(self._draw_pause(attempt, fault.retry_after))

    def _draw_pause(self, attempt: int, requested: float) -> float:
        pause = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
        pause *= self._jitter.uniform(0.5, 1.0)
        return max(pause, min(requested, _LONGEST_REQUESTED_PAUSE))
