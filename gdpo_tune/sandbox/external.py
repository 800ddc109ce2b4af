"""`ExternalSandbox`: candidates run on a service with a SandboxFusion-style `POST /run_code`."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from .address import Address
from .jobs import Call, Job, Limits, Result, SandboxInfo, naming
from .remote_jobs import Findings, Run, prepare
from .service import ResponseTooLong, Service, ServiceFault
from .threaded import Threaded, foreseeing

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_LONGEST_REQUESTED_PAUSE = 60.0
"""Seconds that a service's `Retry-After` is obeyed."""
_FAREWELL_SECONDS = 5.0
_CHECK_SECONDS = 10.0


class ExternalSandbox(Threaded):
    """Runs untrusted Python on somebody else's machine; a context manager.

    How well candidates are locked in is up to the service. What leaves this machine is code and
    inputs; expected values stay, and answers are compared here, so that a candidate's forged
    answer is no more than a value. Differences to `CodeSandbox`:

    - The clock is `Limits.wall_seconds` for one run of the interpreter there: all calls and
      asserts of a job, or one stream. `Result.cpu_seconds` is wall time, as the service tells it.
    - Asserts are `assert f(literals) == literal` alone; others need a checker beside the judge.
    - The service's Python runs the code, with the packages that are installed there.
    - SandboxFusion passes on some 128 KiB of output; more is status `output`.
    - A process killed by SIGKILL counts as `memory`, because services end such processes so.

    Args:
        url: `http[s]://[user:password@]host[:port][/path]`, with or without `/run_code` at the
            end. Credentials are sent and never shown. Proxies of the environment are used,
            except for this machine.
        workers: requests under way at once.
        attempts: how often a job is sent before the service's failures are raised.
        timeout: seconds to wait for a response beyond the time that a job may take.

    Raises:
        SandboxUnavailable: a tiny job did not come back right; the message names address and
            reason.
    """

    def __init__(
        self, url: str, workers: int = 4, *, attempts: int = 3, timeout: float = 30.0
    ) -> None:
        super().__init__()
        if workers < 1 or attempts < 1 or not timeout > 0:
            raise ValueError("workers, attempts and timeout must be positive")
        self._address = Address.parse(url)
        self._attempts = attempts
        # NOTE: its own generator, because training's must not depend on a service's moods.
        self._jitter = random.Random()
        self._tasks: SimpleQueue[tuple[_Batch, int] | None] = SimpleQueue()
        self._services = [Service(self._address, timeout) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(service,), name=f"external-{i}", daemon=True)
            for i, service in enumerate(self._services)
        ]
        for thread in self._threads:
            thread.start()
        self.info = SandboxInfo("external", (self._address.shown,))
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Ask whether the service works.

        Raises:
            SandboxUnavailable: the answer to a tiny job is not what it must be.
        """
        number = random.SystemRandom().randrange(10**6)
        job = Job(
            "def double(x): return 2 * x",
            (Call("double", (number,), 2 * number),),
            limits=Limits(wall_seconds=_CHECK_SECONDS),
        )
        try:
            [result] = self.run_batch([job])
        except SandboxInfraError as error:
            raise SandboxUnavailable(str(error)) from error
        if not result.passed:
            raise SandboxUnavailable(
                f"{self._address.shown}: a job that should pass came back as {result.status}: "
                f"{result.untrusted_detail or 'a wrong value'}"
            )

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in a process of its own on the service; one result a job, in order.

        Raises:
            SandboxInfraError: the service failed `attempts` times; no job gets a verdict then.
            SandboxUnavailable: it refuses the request itself (HTTP 4xx).
            ValueError, TypeError: a test has neither `assert` nor `raise`, is no plain call, or
                holds a value that cannot be sent, and nothing was sent; or this is closed.
            RuntimeError: this is a fork of the process that made this sandbox.
        """
        self._require_threads()
        batch = _Batch([(job, _prepare(index, job)) for index, job in enumerate(jobs)])
        for index in range(len(batch.jobs)):
            self._tasks.put((batch, index))
        if self._closing.is_set():
            batch.deliver(0, SandboxInfraError(f"{self._address.shown}: closed meanwhile"))
        return batch.wait()

    def close(self) -> None:
        """End every connection; idempotent, and from any thread."""
        if self._is_forked():
            return
        self._closing.set()
        for _ in self._threads:
            self._tasks.put(None)
        for service in self._services:
            service.interrupt()
        for thread in self._threads:
            thread.join(_FAREWELL_SECONDS)

    def _work(self, service: Service) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                batch, index = task
                self._serve(service, batch, index)
        finally:
            # NOTE: without one of its threads, a batch could wait for ever.
            self._closing.set()
            service.close()

    def _serve(self, service: Service, batch: _Batch, index: int) -> None:
        outcome: Result | GdpoTuneError = SandboxInfraError("a thread of the sandbox has died")
        try:
            if batch.is_wanted():
                with foreseeing():
                    outcome = self._run(service, *batch.jobs[index])
        except GdpoTuneError as error:
            outcome = error
        finally:
            batch.deliver(index, outcome)

    def _run(self, service: Service, job: Job, runs: Sequence[Run]) -> Result:
        tests = len(runs) if job.streams else len(job.calls) + len(job.asserts)
        findings = Findings(tests, job.limits.output_bytes)
        for run in runs:
            try:
                self._ask(service, job.limits, run, findings)
            except ResponseTooLong:
                findings.overflow()
            if findings.stop is not None:
                break
        return findings.conclude()

    def _ask(self, service: Service, limits: Limits, run: Run, findings: Findings) -> None:
        for attempt in itertools.count(1):
            if self._closing.is_set():
                raise SandboxInfraError(f"{self._address.shown}: closed before it had answered")
            try:
                findings.add(run, service.execute(run.program, run.stdin, limits))
                return
            except ServiceFault as fault:
                if attempt == self._attempts:
                    raise SandboxInfraError(
                        f"{self._address.shown}: no verdict in {attempt} attempts: {fault}"
                    ) from fault
                self._closing.wait(self._pause(attempt, fault.retry_after))

    def _pause(self, attempt: int, requested: float) -> float:
        pause = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
        pause *= self._jitter.uniform(0.5, 1.0)
        return max(pause, min(requested, _LONGEST_REQUESTED_PAUSE))


def _prepare(index: int, job: Job) -> list[Run]:
    with naming(f"job {index}"):
        return prepare(job)


class _Batch:
    """Jobs that threads take one by one, and the one thread that waits for all of them."""

    def __init__(self, jobs: list[tuple[Job, list[Run]]]) -> None:
        self.jobs = jobs
        self._results: dict[int, Result] = {}
        self._error: GdpoTuneError | None = None
        self._abandoned = False
        self._changed = threading.Condition()

    def is_wanted(self) -> bool:
        """Whether anybody still waits for a job's result."""
        return not self._abandoned and self._error is None

    def deliver(self, index: int, outcome: Result | GdpoTuneError) -> None:
        """A job is done, or the whole batch has failed."""
        with self._changed:
            if isinstance(outcome, Result):
                self._results[index] = outcome
            elif self._error is None:
                self._error = outcome
            self._changed.notify_all()

    def wait(self) -> list[Result]:
        """Results in the order of the jobs; the first failure at once."""
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error is not None or len(self._results) == len(self.jobs)
                )
        finally:
            self._abandoned = True
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(len(self.jobs))]
