"""`CodeSandbox`: workers, each with a thread of its own, and batches for them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from ..core.system import CloseableResource, count_parallel_candidates, read_machine_memory
from .guest.grading import FORGED, CandidateReport, grade_frames, grade_output, grade_value
from .guest.protocol import (
    READY,
    Allowance,
    Encoded,
    ExitStatus,
    FrameTooLong,
    decode,
    dump,
    pack_frame,
    parse,
    read_exactly,
    read_frame,
)
from .jobs import InfraFault, Job, Result, SandboxInfo, conclude, encode_tests, name_in_errors
from .process import ADVICE, SandboxProcess


class Sandbox(CloseableResource):
    """Workers, isolated or not, and the batches that they share.

    Only the process that made it can use it, until it is closed.
    """

    info: SandboxInfo

    def __init__(self, workers: int, modules: tuple[str, ...], *, isolated: bool) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers cannot run anything")
        if sys.platform != "linux":
            reason = f"platform: the sandbox needs Linux, this is {sys.platform}"
            raise SandboxUnavailable(f"{reason}; {ADVICE}")
        self._owner = os.getpid()
        self._closed = False
        self._submitting = threading.Lock()
        self._memory = read_machine_memory()
        self._workers: dict[int, Worker] = {}
        # NOTE: one thread per worker, because its process dies with the thread that starts it.
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

    def _require_open(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this sandbox belongs to process {self._owner}: a fork must open its own"
            )
        if self._closed:
            raise ValueError("this sandbox is closed")

    def _close_worker(self, number: int) -> None:
        # NOTE: before the end of this thread, which would kill its process.
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


class CodeSandbox(Sandbox):
    """Runs untrusted Python, which may import `modules`, against tests; a context manager.

    Each worker is a process, a zygote that forks candidates. Their results are compared here, where
    the expected values stay. All end with `close`, and with this process, however that ends.

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


class UnsafeNoIsolationSandbox(Sandbox):
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
_GRACE_SECONDS = 30.0
"""Seconds that a job may take beyond its own limits on a machine that is busy elsewhere."""
_OTHER_FRAME_BYTES = 2048
"""Bytes per test, beyond the printed ones, for the frame that reports an exception instead."""
_VERDICT_BYTES = 1 << 16
"""Most bytes of a verdict besides what it quotes of the candidate."""
_TIMEVAL = struct.Struct("@ll")


@dataclass
class EncodedJob:
    """A job in the form in which it is sent, and how often it was."""

    index: int
    job: Job
    tests: int
    allowance: Allowance
    """Limits of the candidate's process."""
    request: bytes
    """Frame for the candidate."""
    most: int
    """Bytes that the candidate may send altogether."""
    expected: list[Any]
    """Expected value of each call, or expected output of each stream and its tolerance."""
    checks: bytes = b""
    """Frame for a checker, with every test, where some are more than calls."""
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
    calls, expected, checks, most = None, list[Any](), b"", limits.output_bytes
    if inputs:
        expected = [(stream.expected, stream.tolerance) for stream in job.streams]
        most += len(inputs) * _OTHER_FRAME_BYTES
    elif all(kind == "call" for kind, *_ in tests):
        calls = [[function, arguments] for _, function, arguments, _ in tests]
        expected = decode(parse(dump([value for *_, value in tests])))
    else:
        checks = pack_frame(dump([most, limits.cpu_seconds, tests]))
    request: Encoded = [job.code, job.seed, limits.output_bytes, calls, inputs or None]
    if limits.test_cpu_seconds < limits.cpu_seconds:
        share = limits.test_cpu_seconds / limits.cpu_seconds
        request += [limits.test_cpu_seconds, limits.wall_seconds * share]
    frame = pack_frame(dump(request))
    return EncodedJob(index, job, len(inputs or tests), allowance, frame, most, expected, checks)


class Worker:
    """A zygote and its candidates, graded in one thread; a zygote that fails is replaced."""

    def __init__(self, modules: tuple[str, ...] = (), *, isolated: bool = True) -> None:
        self._modules = modules
        self._isolated = isolated
        self._interrupted = False
        self._zygote = SandboxProcess(modules, isolated=isolated)
        self.layers = self._zygote.layers

    def run(self, waiting: deque[EncodedJob], results: dict[int, Result]) -> None:
        """Run waiting jobs, which workers share, and store each result under the index of its job.

        Raises:
            SandboxInfraError: a job had no verdict in `ATTEMPTS` attempts.
            SandboxUnavailable: a failed zygote could not be replaced.
        """
        try:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:  # none is left; other workers take some, too
                    return
                try:
                    job.attempts += 1
                    results[job.index] = self._run_job(job)
                except InfraFault as fault:
                    self._restart()
                    if job.attempts >= ATTEMPTS:
                        reason = f"no verdict in {ATTEMPTS} attempts: {fault}"
                        raise SandboxInfraError(reason) from fault
                    waiting.appendleft(job)
        except GdpoTuneError:
            raise
        except BaseException:
            # NOTE: the answer to the job in flight would be read as the answer to the next one.
            self._zygote.kill()
            raise

    def _run_job(self, job: EncodedJob) -> Result:
        """Run a candidate, and a checker if the job needs one; return the result.

        Raises:
            InfraFault: the sandbox failed, not the candidate.
        """
        seconds = 2 * job.allowance.wall_seconds + _GRACE_SECONDS
        report = CandidateReport()
        try:
            with ExitStack() as stack:
                pairs = [_open_pair(stack, seconds) for _ in range(2 if job.checks else 1)]
                candidate = pairs[0][0]
                given = [theirs for _, theirs in pairs] + ([candidate] if job.checks else [])
                request = Allowance.FORMAT.pack(*job.allowance)
                self._zygote.send(request, [end.fileno() for end in given])
                for _, theirs in pairs:
                    theirs.close()
                # NOTE: the zygote reports a candidate that ended before it read its job.
                with suppress(ConnectionError):
                    candidate.sendall(job.request)
                try:
                    report.started = read_exactly(candidate.recv, len(READY)) == READY
                    if job.checks:
                        _collect_verdicts(pairs[1][0], job, report)
                    else:
                        rule = job.job.comparison
                        grade = partial(grade_output if job.job.streams else grade_value, rule=rule)
                        grade_frames(candidate.recv, job.expected, job.most, report, grade)
                except (EOFError, ConnectionError):
                    report.stop = "ended"
                # NOTE: not only closed: the candidate must see the end even where this process
                # has been forked.
                candidate.shutdown(socket.SHUT_RDWR)
        except BlockingIOError as error:
            raise InfraFault("a candidate or a checker does not answer in time") from error
        except OSError as error:
            raise InfraFault(f"a job could not be sent: {error}") from error
        size = ExitStatus.FORMAT.size
        ending, *of_checker = [
            ExitStatus(*ExitStatus.FORMAT.unpack(self._zygote.receive(size, seconds)))
            for _ in pairs
        ]
        if any(each.timed_out or each.signal == signal.SIGPROF for each in of_checker):
            report.stop = "overload"
        return conclude(report, ending, job.tests, job.job.limits)

    def _restart(self) -> None:
        self._zygote.kill()
        if not self._interrupted:
            self._zygote = SandboxProcess(self._modules, isolated=self._isolated)
        # NOTE: read again, because `interrupt` does not reach a process that is being started.
        if self._interrupted:
            raise SandboxInfraError("the sandbox was closed before a job had its verdict")

    def interrupt(self) -> None:
        """End the running job without a verdict and refuse later ones; from any thread."""
        self._interrupted = True
        self._zygote.interrupt()

    def close(self) -> None:
        """End the zygote."""
        self._zygote.close()


def _open_pair(stack: ExitStack, seconds: float) -> tuple[socket.socket, socket.socket]:
    """Open our end of a connection, whose every call takes at most `seconds`, and theirs."""
    ours, theirs = map(stack.enter_context, socket.socketpair())
    # NOTE: a Python timeout would make a checker's copy of this socket non-blocking.
    most = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, most)
    return ours, theirs


def _collect_verdicts(checker: socket.socket, job: EncodedJob, report: CandidateReport) -> None:
    """Send the tests to a checker and read its verdicts.

    A checker reads what a candidate sends, so its frames are not trusted either.

    Raises:
        EOFError, ConnectionError: the checker ended before it had every verdict.
    """
    # NOTE: from here on of the checker: its tests have no verdict if it ends before it is locked.
    report.started = False
    report.started = read_exactly(checker.recv, len(READY)) == READY
    checker.sendall(job.checks)
    try:
        for _ in range(job.tests):
            match parse(read_frame(checker.recv, job.most + _VERDICT_BYTES)):
                case ["test", "passed" | "failed" | "error" as verdict, str(error), str(text)]:
                    report.add(verdict, error, text)
                case ["stop", str(reason), str(error), str(text)]:
                    report.note(error, text)
                    report.stop = reason
                    return
                case _:
                    report.stop = "malformed"
                    return
    except (FrameTooLong, *FORGED):
        report.stop = "malformed"
