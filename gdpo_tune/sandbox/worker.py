"""One zygote and one judge, kept busy with the jobs of a batch."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..errors import SandboxInfraError, SandboxUnavailable
from .asserts import read_assert
from .inside.encoding import Encoded, dump, encode
from .inside.frames import pack
from .inside.supervision import Allowance, Ending
from .jobs import Call, Job, Result
from .process import SandboxProcess
from .verdicts import Infra, conclude

ATTEMPTS = 3
_IN_FLIGHT = 2
"""While the judge compares one job's answers, the zygote forks the next one's candidate."""
_GRACE_SECONDS = 30.0
"""Beyond its own limits, how long a job may take on a machine that is busy elsewhere."""

_TIMEVAL = struct.Struct("@ll")


@dataclass
class Task:
    """A job in the form in which it is sent, and how often it was."""

    index: int
    job: Job
    tests: int
    candidate_request: bytes
    judge_request: bytes
    attempts: int = field(default=0)

    @property
    def allowance(self) -> Allowance:
        """The limits of the candidate's process."""
        limits = self.job.limits
        return Allowance(limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes)


def prepare(index: int, job: Job) -> Task:
    """Encode a job.

    Raises:
        ValueError: a test is no Python, cannot fail, or holds a value nested too deeply.
        TypeError: a call holds a value that cannot be sent.
    """
    tests: list[Call | str] = [*job.calls, *(read_assert(test) or test for test in job.asserts)]
    calls = [test for test in tests if isinstance(test, Call)]
    limits = job.limits
    if len(calls) == len(tests):
        asked: Encoded = [[call.function, _encode_all(call.args)] for call in calls]
        judged: list[Encoded] = [_encode_all([call.expected for call in calls]), None, None]
    else:
        asked = None
        seconds = [limits.cpu_seconds, limits.wall_seconds]
        judged = [None, [_encode_test(test) for test in tests], [*seconds, limits.memory_bytes]]
    return Task(
        index,
        job,
        len(tests),
        pack(dump([job.code, job.seed, limits.output_bytes, asked])),
        pack(dump([limits.output_bytes, *judged])),
    )


def _encode_test(test: Call | str) -> Encoded:
    if isinstance(test, str):
        return ["assert", test]
    return ["call", test.function, _encode_all(test.args), encode(test.expected, strict=True)]


def _encode_all(values: tuple[object, ...] | list[object]) -> list[Encoded]:
    return [encode(value, strict=True) for value in values]


def _start_pair() -> tuple[SandboxProcess, SandboxProcess]:
    zygote = SandboxProcess("zygote")
    try:
        # NOTE: both are on their way before the first is waited for.
        judge = SandboxProcess("judge")
        try:
            zygote.wait_until_locked()
            judge.wait_until_locked()
        except SandboxUnavailable:
            judge.kill()
            raise
    except SandboxUnavailable:
        zygote.kill()
        raise
    return zygote, judge


class Worker:
    """A zygote and its judge; both are replaced when one of them fails.

    Lives in one thread, because its processes die with the thread that started them.
    """

    def __init__(self) -> None:
        self._zygote, self._judge = _start_pair()
        self.layers = self._zygote.layers

    def run(self, source: Iterator[Task], deliver: Callable[[int, Result], None]) -> None:
        """Run every task of the source and deliver each result under its task's index.

        Raises:
            SandboxInfraError: a task had no verdict in `ATTEMPTS` attempts.
            SandboxUnavailable: a failed zygote or judge could not be replaced.
        """
        waiting: deque[Task] = deque()
        flying: deque[Task] = deque()
        while True:
            try:
                while len(flying) < _IN_FLIGHT:
                    task = waiting.popleft() if waiting else next(source, None)
                    if task is None:
                        break
                    flying.append(task)
                    self._submit(task)
                if not flying:
                    return
                result = self._collect(flying[0])
                deliver(flying.popleft().index, result)
            except Infra as failure:
                self._replace(failure, flying)
                waiting.extendleft(reversed(flying))
                flying.clear()

    def _submit(self, task: Task) -> None:
        task.attempts += 1
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    self._zygote.send(task.allowance.pack(), theirs.fileno())
                self._hand_over(task, ours)
                # NOTE: last, so that no question of a checker can come before the job itself.
                self._judge.send(task.judge_request, ours.fileno())
        except OSError as error:
            raise Infra(f"a job could not be sent: {error}") from error

    def _hand_over(self, task: Task, ours: socket.socket) -> None:
        # NOTE: a Python timeout would make the judge's copy of this socket non-blocking.
        seconds = int(task.job.limits.wall_seconds + _GRACE_SECONDS)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, 0))
        # NOTE: a candidate that ended before it read its job is the zygote's to report.
        with contextlib.suppress(ConnectionError):
            ours.sendall(task.candidate_request)

    def _collect(self, task: Task) -> Result:
        patience = 2 * task.job.limits.wall_seconds + _GRACE_SECONDS
        report = self._judge.receive_report(patience)
        ending = Ending.unpack(self._zygote.receive(Ending.FORMAT.size, patience))
        return conclude(report, ending, task.tests, task.job.limits)

    def _replace(self, failure: Infra, flying: deque[Task]) -> None:
        spent = next((task for task in flying if task.attempts >= ATTEMPTS), None)
        self._zygote.kill()
        self._judge.kill()
        self._zygote, self._judge = _start_pair()
        if spent is not None:
            raise SandboxInfraError(f"no verdict in {ATTEMPTS} attempts: {failure}") from failure

    def close(self) -> None:
        """End both processes."""
        self._zygote.close()
        self._judge.close()
