"""`CodeSandbox`: workers, each with a thread of its own, and batches for them."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from ..core.system import count_parallel_candidates, read_machine_memory
from .guest.grading import CandidateReport
from .guest.protocol import Allowance, Encoded, ExitStatus, dump, pack_frame
from .jobs import (
    InfraFault,
    Job,
    Result,
    Sandbox,
    SandboxInfo,
    conclude,
    encode_tests,
    name_in_errors,
)
from .process import ADVICE, SandboxProcess


class _Pool(Sandbox):
    """Workers, isolated or not, and the batches that they share."""

    def __init__(self, workers: int, modules: tuple[str, ...], *, isolated: bool) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers cannot run anything")
        if sys.platform != "linux":
            reason = f"platform: the sandbox needs Linux, this is {sys.platform}"
            raise SandboxUnavailable(f"{reason}; {ADVICE}")
        super().__init__()
        self._memory = read_machine_memory()
        self._workers: dict[int, Worker] = {}
        # NOTE: one thread per worker, because its processes die with the thread that starts them.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"sandbox-{number}")
            for number in range(workers)
        ]
        with ExitStack() as undo:
            undo.callback(self.close)
            self._start_workers(modules, isolated)
            undo.pop_all()

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in a fresh process; return one result per job, in their order.

        Raises:
            SandboxInfraError: the sandbox itself failed repeatedly; no job gets a verdict then.
            ValueError, TypeError: see `encode_tests` and `count_workers_in_memory`; or this is
                closed.
            RuntimeError: this is a fork of the process that made this sandbox.
        """
        self._require_open()
        jobs = list(jobs)
        count = count_workers_in_memory(len(self._threads), jobs, self._memory)
        waiting = deque(encode_job(index, job) for index, job in enumerate(jobs))
        results: dict[int, Result] = {}
        with self._submitting:
            self._require_open()
            futures = [
                thread.submit(self._workers[number].run, waiting, results)
                for number, thread in enumerate(self._threads[:count])
            ]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            waiting.clear()
        _raise_failure(futures, SandboxInfraError, "unforeseen error in the sandbox")
        return [results[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End every process, and jobs that are running without a verdict; idempotent."""
        if os.getpid() != self._owner:
            return
        with self._submitting:
            self._closed = True
        for worker in list(self._workers.values()):
            worker.interrupt()
        for number, thread in enumerate(self._threads):
            with suppress(RuntimeError):  # this thread has ended, or was never started
                thread.submit(self._close_worker, number)
        for thread in self._threads:
            thread.shutdown()

    def _close_worker(self, number: int) -> None:
        # NOTE: before the end of this thread, which would kill half of its processes first.
        if number in self._workers:  # it may have failed to start
            self._workers[number].close()

    def _start_workers(self, modules: tuple[str, ...], isolated: bool) -> None:
        def start(number: int) -> None:
            self._workers[number] = Worker(modules, isolated=isolated)

        futures: list[Future[None]] = []
        for number, thread in enumerate(self._threads):
            try:
                futures.append(thread.submit(start, number))
            except RuntimeError as error:
                reason = f"threads: {number} of {len(self._threads)} workers, then: {error}"
                raise SandboxUnavailable(reason) from error
        _raise_failure(futures, SandboxUnavailable, "worker: cannot be started")


class CodeSandbox(_Pool):
    """Runs untrusted Python, which may import `modules`, against tests; a context manager.

    Each worker is two processes, a zygote that forks candidates and a judge. All end with `close`,
    and with the process that made them, however that ends.

    Raises:
        SandboxUnavailable: this machine cannot isolate a process, or start one; the message
            names the step.
    """

    def __init__(self, workers: int = 1, *, modules: tuple[str, ...] = ()) -> None:
        super().__init__(workers, modules, isolated=True)
        layers = self._workers[0].layers
        has_landlock = any(layer.startswith("landlock") for layer in layers)
        if "namespaces" in layers:
            self.info = SandboxInfo("full" if has_landlock else "seccomp+namespaces", layers)
        else:
            self.info = SandboxInfo("seccomp+landlock" if has_landlock else "seccomp", layers)


class UnsafeNoIsolationSandbox(_Pool):
    """Runs Python that you would run yourself: only limits and clocks hold.

    Code has all the rights of the trainer's user, and may leave processes behind. Only for code
    that is trusted, or a machine that may be lost. Grading is as in `CodeSandbox`.

    Raises:
        SandboxUnavailable: this is not Linux, or no process can be started.
    """

    def __init__(self, workers: int = 1, *, modules: tuple[str, ...] = ()) -> None:
        super().__init__(workers, modules, isolated=False)
        self.info = SandboxInfo("unsafe", self._workers[0].layers)
        logging.getLogger("gdpo_tune.sandbox").warning(
            "unsafe_no_isolation: code that a model writes runs with all the rights of user %s",
            os.getuid(),
        )


def count_workers_in_memory(workers: int, jobs: Sequence[Job], memory: int | None) -> int:
    """Return how many of the workers may run these jobs at once; at least one.

    A job with asserts counts twice, because its tests may need a process of their own. `memory` is
    in bytes; None if unknown.

    Raises:
        ValueError: one job alone may use more memory than the machine has.
    """
    if memory is None:
        return workers
    for job in jobs:
        if job.limits.memory_bytes > memory:
            raise ValueError(
                f"a job's limit is {job.limits.memory_bytes >> 20} MiB of memory, "
                f"and this machine has {memory >> 20} MiB"
            )
    largest = max((job.limits.memory_bytes * (2 if job.asserts else 1) for job in jobs), default=1)
    return min(workers, count_parallel_candidates(memory, largest))


def _raise_failure(futures: Sequence[Future[None]], kind: type[GdpoTuneError], reason: str) -> None:
    """Raise the first failure; an unforeseen error becomes one of this kind."""
    for future in futures:
        try:
            future.result()
        except GdpoTuneError:
            raise
        except Exception as error:
            raise kind(f"{reason}: {error!r}") from error


ATTEMPTS = 3
_IN_FLIGHT = 2
"""While the judge compares one job's answers, the zygote forks the next one's candidate."""
_GRACE_SECONDS = 30.0
"""Seconds that a job may take beyond its own limits on a machine that is busy elsewhere."""
_OTHER_FRAME_BYTES = 2048
"""Bytes per test, beyond the printed ones, for the frame that reports an exception instead."""
_TIMEVAL = struct.Struct("@ll")


@dataclass
class EncodedJob:
    """A job in the form in which it is sent, and how often it was."""

    index: int
    job: Job
    tests: int
    allowance: Allowance
    """Limits of the candidate's process."""
    candidate_request: bytes
    judge_request: bytes
    attempts: int = 0


def encode_job(index: int, job: Job) -> EncodedJob:
    """Encode a job, with the errors of `encode_tests`."""
    limits = job.limits
    inputs = [stream.stdin for stream in job.streams]
    sizes = [len(text.encode()) for text in inputs]
    file_bytes = max(limits.output_bytes, sum(sizes)) if inputs else 0
    allowance = Allowance(limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes, file_bytes)
    with name_in_errors(f"job {index}"):
        tests = encode_tests((*job.calls, *job.asserts))
    calls: Encoded = None
    if inputs:
        expected: Encoded = [[stream.expected, stream.tolerance] for stream in job.streams]
        most = limits.output_bytes + len(inputs) * _OTHER_FRAME_BYTES
        judged = [most, "streams", expected, job.comparison]
    elif all(kind == "call" for kind, *_ in tests):
        calls = [[function, arguments] for _, function, arguments, _ in tests]
        expected = [expected for *_, expected in tests]
        judged = [limits.output_bytes, "values", expected, job.comparison]
    else:
        judged = [limits.output_bytes, "tests", tests, *allowance]
    request: Encoded = [job.code, job.seed, limits.output_bytes, calls, inputs or None]
    if limits.test_cpu_seconds < limits.cpu_seconds:
        share = limits.test_cpu_seconds / limits.cpu_seconds
        request += [limits.test_cpu_seconds, limits.wall_seconds * share]
    messages = pack_frame(dump(request)), pack_frame(dump(judged))
    return EncodedJob(index, job, len(inputs or tests), allowance, *messages)


def _start_pair(modules: tuple[str, ...], isolated: bool) -> tuple[SandboxProcess, SandboxProcess]:
    with ExitStack() as undo:
        zygote = SandboxProcess("zygote", modules, isolated=isolated)
        undo.callback(zygote.kill)
        # NOTE: both start before the wait for the first.
        judge = SandboxProcess("judge", modules, isolated=isolated)
        undo.callback(judge.kill)
        zygote.wait_until_locked()
        judge.wait_until_locked()
        undo.pop_all()
    return zygote, judge


class Worker:
    """A zygote and its judge in one thread; both are replaced when one of them fails."""

    def __init__(self, modules: tuple[str, ...] = (), *, isolated: bool = True) -> None:
        self._modules = modules
        self._isolated = isolated
        self._interrupted = False
        self._zygote, self._judge = _start_pair(modules, isolated)
        self.layers = self._zygote.layers

    def run(self, waiting: deque[EncodedJob], results: dict[int, Result]) -> None:
        """Run waiting jobs, which workers share, and store each result under the index of its job.

        Raises:
            SandboxInfraError: a job had no verdict in `ATTEMPTS` attempts.
            SandboxUnavailable: a failed zygote or judge could not be replaced.
        """
        in_flight: deque[EncodedJob] = deque()
        try:
            while True:
                try:
                    while len(in_flight) < _IN_FLIGHT:
                        try:
                            job = waiting.popleft()
                        except IndexError:  # none is left; other workers take some, too
                            break
                        in_flight.append(job)
                        self._submit(job)
                    if not in_flight:
                        return
                    results[in_flight[0].index] = self._collect(in_flight[0])
                    in_flight.popleft()
                except InfraFault as fault:
                    self._restart()
                    if any(job.attempts >= ATTEMPTS for job in in_flight):
                        reason = f"no verdict in {ATTEMPTS} attempts: {fault}"
                        raise SandboxInfraError(reason) from fault
                    waiting.extendleft(reversed(in_flight))
                    in_flight.clear()
        except GdpoTuneError:
            raise
        except BaseException:
            # NOTE: answers to the jobs in flight would be read as answers to the next batch.
            self._kill()
            raise

    def _submit(self, job: EncodedJob) -> None:
        job.attempts += 1
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    self._zygote.send(Allowance.FORMAT.pack(*job.allowance), theirs.fileno())
                # NOTE: a Python timeout would make the judge's copy of this socket non-blocking.
                seconds = int(job.allowance.wall_seconds + _GRACE_SECONDS)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, 0))
                # NOTE: the zygote reports a candidate that ended before it read its job.
                with suppress(ConnectionError):
                    ours.sendall(job.candidate_request)
                # NOTE: last, so that no request of a checker can come before the job itself.
                self._judge.send(job.judge_request, ours.fileno())
        except OSError as error:
            raise InfraFault(f"a job could not be sent: {error}") from error

    def _collect(self, job: EncodedJob) -> Result:
        seconds = 2 * job.allowance.wall_seconds + _GRACE_SECONDS
        report = CandidateReport(**self._judge.receive_report(seconds))
        ending = ExitStatus(
            *ExitStatus.FORMAT.unpack(self._zygote.receive(ExitStatus.FORMAT.size, seconds))
        )
        return conclude(report, ending, job.tests, job.job.limits)

    def _restart(self) -> None:
        self._kill()
        if not self._interrupted:
            self._zygote, self._judge = _start_pair(self._modules, self._isolated)
        # NOTE: read again, because `interrupt` does not reach processes that are being started.
        if self._interrupted:
            raise SandboxInfraError("the sandbox was closed before a job had its verdict")

    def _kill(self) -> None:
        self._zygote.kill()
        self._judge.kill()

    def interrupt(self) -> None:
        """End the running job without a verdict and refuse later ones; from any thread."""
        self._interrupted = True
        self._zygote.interrupt()
        self._judge.interrupt()

    def close(self) -> None:
        """End both processes."""
        self._zygote.close()
        self._judge.close()
