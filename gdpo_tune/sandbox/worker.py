"""One worker: a zygote and a judge, kept busy with the jobs of a batch."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass

from ..core.errors import GdpoTuneError, SandboxInfraError
from .asserts import encode_tests
from .inside.candidate_report import CandidateReport
from .inside.encoding import Encoded, dump
from .inside.frames import Allowance, Ending, pack
from .jobs import Job, Result, name_in_errors
from .process import SandboxProcess
from .verdicts import InfraFault, conclude

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
    """Encode a job; raise ValueError or TypeError as `encode_tests` does."""
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
    messages = pack(dump(request)), pack(dump(judged))
    return EncodedJob(index, job, len(inputs or tests), allowance, *messages)


def _start_pair(modules: tuple[str, ...], isolated: bool) -> tuple[SandboxProcess, SandboxProcess]:
    with contextlib.ExitStack() as undo:
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
    """A zygote and its judge; both are replaced when one of them fails.

    Lives in one thread, because its processes die with the thread that started them.
    """

    def __init__(self, modules: tuple[str, ...] = (), *, isolated: bool = True) -> None:
        self._modules = modules
        self._isolated = isolated
        self._interrupted = False
        self._zygote, self._judge = _start_pair(modules, isolated)
        self.layers = self._zygote.layers

    def run(self, waiting: deque[EncodedJob], results: dict[int, Result]) -> None:
        """Run waiting jobs until none is left; several workers may share them.

        Each result is stored under the index of its job.

        Raises:
            SandboxInfraError: a job had no verdict in `ATTEMPTS` attempts.
            SandboxUnavailable: a failed zygote or judge could not be replaced.
        """
        in_flight: deque[EncodedJob] = deque()
        try:
            while True:
                try:
                    while len(in_flight) < _IN_FLIGHT and (job := _take_job(waiting)):
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
                _send_request(job, ours)
                # NOTE: last, so that no request of a checker can come before the job itself.
                self._judge.send(job.judge_request, ours.fileno())
        except OSError as error:
            raise InfraFault(f"a job could not be sent: {error}") from error

    def _collect(self, job: EncodedJob) -> Result:
        seconds = 2 * job.allowance.wall_seconds + _GRACE_SECONDS
        report = CandidateReport(**self._judge.receive_report(seconds))
        ending = Ending(*Ending.FORMAT.unpack(self._zygote.receive(Ending.FORMAT.size, seconds)))
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
        """End the running job without a verdict, and refuse later ones; from any thread."""
        self._interrupted = True
        self._zygote.interrupt()
        self._judge.interrupt()

    def close(self) -> None:
        """End both processes."""
        self._zygote.close()
        self._judge.close()


def _take_job(waiting: deque[EncodedJob]) -> EncodedJob | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _send_request(job: EncodedJob, connection: socket.socket) -> None:
    # NOTE: a Python timeout would make the judge's copy of this socket non-blocking.
    seconds = int(job.allowance.wall_seconds + _GRACE_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, 0))
    # NOTE: the zygote reports a candidate that ended before it read its job.
    with contextlib.suppress(ConnectionError):
        connection.sendall(job.candidate_request)
