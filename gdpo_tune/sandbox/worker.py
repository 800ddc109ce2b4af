"""One zygote and one judge, kept busy with the jobs of a batch."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..core.errors import GdpoTuneError, SandboxInfraError
from .asserts import read_assert
from .inside.encoding import Encoded, dump, encode
from .inside.frames import pack
from .inside.report import Report
from .inside.supervision import Allowance, Ending
from .jobs import Call, Job, Result, naming
from .process import SandboxProcess
from .verdicts import Infra, conclude

ATTEMPTS = 3
_IN_FLIGHT = 2
"""While the judge compares one job's answers, the zygote forks the next one's candidate."""
_GRACE_SECONDS = 30.0
"""Beyond its own limits, how long a job may take on a machine that is busy elsewhere."""

_OTHER_FRAME_BYTES = 2048
"""Beyond what a program may print, room a test for the frame that says what it raised instead."""

_TIMEVAL = struct.Struct("@ll")


@dataclass
class Task:
    """A job in the form in which it is sent, and how often it was."""

    index: int
    job: Job
    tests: int
    candidate_request: bytes
    judge_request: bytes
    file_bytes: int = 0
    """What the files that stand for a program's streams may hold; 0 if it has none."""
    attempts: int = field(default=0)

    @property
    def allowance(self) -> Allowance:
        """The limits of the candidate's process."""
        limits = self.job.limits
        return Allowance(
            limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes, self.file_bytes
        )


def prepare(index: int, job: Job) -> Task:
    """Encode a job.

    Raises:
        ValueError: a test is no Python, has neither `assert` nor `raise`, or holds a value
            nested too deeply.
        TypeError: a call holds a value that cannot be sent.
    """
    with naming(f"job {index}"):
        return _prepare_program(index, job) if job.streams else _prepare_functions(index, job)


def _prepare_program(index: int, job: Job) -> Task:
    output_bytes = job.limits.output_bytes
    inputs = [stream.stdin for stream in job.streams]
    judged: Encoded = [[stream.expected, stream.tolerance] for stream in job.streams]
    return Task(
        index,
        job,
        len(inputs),
        pack(dump([job.code, job.seed, output_bytes, None, inputs])),
        pack(dump([output_bytes + len(inputs) * _OTHER_FRAME_BYTES, "streams", judged])),
        file_bytes=max(output_bytes, sum(len(text.encode()) for text in inputs)),
    )


def _prepare_functions(index: int, job: Job) -> Task:
    tests: list[list[Encoded]] = []
    for number, test in enumerate((*job.calls, *job.asserts)):
        with naming(f"test {number}"):
            tests.append(_encode_test(test))
    limits = job.limits
    if all(kind == "call" for kind, *_ in tests):
        asked: Encoded = [[function, arguments] for _, function, arguments, _ in tests]
        judged: list[Encoded] = ["values", [expected for *_, expected in tests]]
    else:
        asked = None
        judged = ["tests", tests, limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes]
    return Task(
        index,
        job,
        len(tests),
        pack(dump([job.code, job.seed, limits.output_bytes, asked, None])),
        pack(dump([limits.output_bytes, *judged])),
    )


def _encode_test(test: Call | str) -> list[Encoded]:
    call = read_assert(test) if isinstance(test, str) else test
    if call is None:
        return ["assert", test]
    arguments: Encoded = [encode(argument, strict=True) for argument in call.args]
    return ["call", call.function, arguments, encode(call.expected, strict=True)]


def _start_pair(modules: tuple[str, ...], isolated: bool) -> tuple[SandboxProcess, SandboxProcess]:
    with contextlib.ExitStack() as undo:
        zygote = SandboxProcess("zygote", modules, isolated=isolated)
        undo.callback(zygote.kill)
        # NOTE: both are on their way before the first is waited for.
        judge = SandboxProcess("judge", isolated=isolated)
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

    def run(self, source: Iterator[Task], deliver: Callable[[int, Result], None]) -> None:
        """Run every task of the source and deliver each result under its task's index.

        Raises:
            SandboxInfraError: a task had no verdict in `ATTEMPTS` attempts.
            SandboxUnavailable: a failed zygote or judge could not be replaced.
        """
        try:
            self._run(source, deliver)
        except GdpoTuneError:
            raise
        except BaseException:
            # What is under way would be taken for answers to the next batch.
            self._kill()
            raise

    def _run(self, source: Iterator[Task], deliver: Callable[[int, Result], None]) -> None:
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
                self._restart()
                _refuse_spent(flying, failure)
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
        report = Report(**self._judge.receive_report(patience))
        ending = Ending.unpack(self._zygote.receive(Ending.FORMAT.size, patience))
        return conclude(report, ending, task.tests, task.job.limits)

    def _restart(self) -> None:
        self._kill()
        if not self._interrupted:
            self._zygote, self._judge = _start_pair(self._modules, self._isolated)
        # NOTE: asked again, because what was started meanwhile has not been interrupted.
        if self._interrupted:
            raise SandboxInfraError("the sandbox was closed before a job had its verdict")

    def _kill(self) -> None:
        self._zygote.kill()
        self._judge.kill()

    def interrupt(self) -> None:
        """Let the job at hand end without a verdict, and every later one; from any thread."""
        self._interrupted = True
        self._zygote.interrupt()
        self._judge.interrupt()

    def close(self) -> None:
        """End both processes."""
        self._zygote.close()
        self._judge.close()


def _refuse_spent(flying: deque[Task], failure: Infra) -> None:
    if any(task.attempts >= ATTEMPTS for task in flying):
        raise SandboxInfraError(f"no verdict in {ATTEMPTS} attempts: {failure}") from failure
