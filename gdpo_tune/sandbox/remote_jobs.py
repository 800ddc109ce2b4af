"""Jobs for a service: what is sent of them, and what is made of the answer.

Code and inputs go out. What a function should return or a program should print stays here, and
what comes back can only be a value: it is compared as the local sandbox's judge compares.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .asserts import read_assert
from .inside.encoding import Encoded, dump, encode
from .inside.report import FORGED, Report, weigh_value
from .inside.tokens import same_output
from .jobs import Call, Job, Result, Status, Stream, naming
from .service import Execution, ServiceFault, quote
from .verdicts import complete, first_reason

STALL_BYTES = 128 << 10
"""What SandboxFusion reads while a program runs. One that prints more waits for a reader until
its time is up, or ends without the rest."""
_SENT = ("encoding", "untrusted", "remote")
"""Modules of `inside/` that a program brings along, in the order of their imports."""
_PACKAGE = "sandbox_inside"
_UNDECODABLE = "[DecodeError]"
"""What SandboxFusion answers instead of standard output that is no UTF-8."""
_OF_SIGNAL: dict[int, Status] = {9: "memory", 24: "timeout", 25: "output", 31: "violation"}
"""SIGKILL, which services send to what takes too much memory; SIGXCPU; SIGXFSZ; SIGSYS. These are
Linux's numbers, where services run; this machine may be another, with other ones."""
_SIGNALS = 64
_OF_STOP: dict[str, Status] = {"load": "error", "output": "output", "malformed": "violation"}

_BOOT = """import sys
import types

package = types.ModuleType({package!r})
package.__path__ = []
sys.modules[{package!r}] = package
for name, source in {sources!a}.items():
    module = types.ModuleType({package!r} + "." + name)
    module.__package__ = {package!r}
    sys.modules[module.__name__] = module
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules[{package!r} + ".remote"].main(
"""


@dataclass(frozen=True)
class Run:
    """One request: a program, what it reads, and the tests that its answer decides."""

    program: str
    stdin: str
    nonce: str
    tests: tuple[Call, ...] | Stream


def prepare(job: Job) -> list[Run]:
    """What is to be run for a job: its calls and asserts together, or its streams one by one.

    Raises:
        ValueError: a test is no Python, has neither `assert` nor `raise`, is no plain call, or
            holds a value nested too deeply.
        TypeError: a call holds a value that cannot be sent.
    """
    nonce = secrets.token_hex(16)
    if job.streams:
        program = _program(nonce, job, None)
        return [Run(program, stream.stdin, nonce, stream) for stream in job.streams]
    calls: list[Call] = []
    asked: list[Encoded] = []
    for number, test in enumerate((*job.calls, *job.asserts)):
        with naming(f"test {number}"):
            call = _read_assert(test) if isinstance(test, str) else test
            asked.append([call.function, [encode(value, strict=True) for value in call.args]])
            encode(call.expected, strict=True)  # refused here, as by the local sandbox
        calls.append(call)
    return [Run(_program(nonce, job, asked), "", nonce, tuple(calls))]


def _read_assert(source: str) -> Call:
    call = read_assert(source)
    if call is None:
        raise ValueError(
            f"a service cannot run this test, because such tests run beside the judge: {source!r}; "
            "write a Call or `assert f(literals) == literal`, or use the local sandbox"
        )
    return call


def _program(nonce: str, job: Job, asked: Encoded) -> str:
    request = dump([nonce, job.code, job.seed, job.limits.output_bytes, asked])
    return f"{_boot()}{request.decode()!a})\n"


@cache
def _boot() -> str:
    folder = Path(__file__).parent / "inside"
    sources = {name: (folder / f"{name}.py").read_text("utf-8") for name in _SENT}
    return _BOOT.format(package=_PACKAGE, sources=sources)


@dataclass
class Findings:
    """What is known of a job so far."""

    tests: int
    output_left: int
    stop: Status | None = None
    """Why there are no more verdicts."""
    seconds: float = 0.0
    report: Report = field(default_factory=Report)

    def conclude(self) -> Result:
        """The job's result."""
        verdicts = complete(self.report, self.tests)
        if self.report.memory and self.stop in (None, "error", "crash"):
            status = "memory"
        else:
            status = self.stop or first_reason(verdicts)
        return Result(status, verdicts, self.seconds, self.report.detail)

    def overflow(self) -> None:
        """It has printed more than allowed."""
        self.stop = "output"

    def add(self, run: Run, execution: Execution) -> None:
        """Take in what a service says of a run.

        Raises:
            ServiceFault: nothing in it tells that the program was started, so nothing is known.
        """
        answer = _answer_of(run, execution)
        self.seconds += execution.seconds
        if isinstance(run.tests, Stream):
            self._add_output(run.tests, execution, answer)
        else:
            self._add_values(run, run.tests, execution, answer)

    def _add_output(self, test: Stream, execution: Execution, answer: str | None) -> None:
        printed = b"" if answer is None else answer.encode("utf-8", "surrogatepass")
        self.output_left -= len(printed)
        self.stop = "output" if self.output_left < 0 else _stop_of(execution)
        if self.stop is not None:
            return
        if execution.return_code:
            error, _, text = _last_line(execution.stderr).partition(": ")
            self.report.add("error", error, text)
            return
        expected = test.expected.encode("utf-8", "surrogatepass")
        good = answer is not None and same_output(expected, printed, test.tolerance)
        self.report.add("passed" if good else "failed")

    def _add_values(
        self, run: Run, calls: tuple[Call, ...], execution: Execution, answer: str | None
    ) -> None:
        self.stop = "violation" if answer is None else self._weigh(run.nonce, calls, answer)
        self.stop = _stop_of(execution) or self.stop
        missing = len(self.report.verdicts) < len(calls)
        if self.stop is None and (missing or execution.return_code):
            truncated = len(execution.stdout) >= STALL_BYTES
            self.stop = "output" if truncated else "crash"

    def _weigh(self, nonce: str, calls: tuple[Call, ...], answer: str) -> Status | None:
        # NOTE: fewer frames than calls are for the caller to explain; more say nothing.
        for call, frame in zip(calls, _frames_of(nonce, answer), strict=False):
            self.output_left -= len(frame)
            if self.output_left < 0:
                return "output"
            try:
                weigh_value(call.expected, frame.encode(), self.report)
            except FORGED:
                return "violation"
            if self.report.stop is not None:
                return _OF_STOP[self.report.stop]
        return None


def _answer_of(run: Run, execution: Execution) -> str | None:
    """What was printed after the sign that the program started; None if it is not text."""
    _, sign, answer = execution.stdout.partition(f"{run.nonce} {json.dumps(['begin'])}\n")
    if sign:
        return answer
    if execution.stdout.startswith(_UNDECODABLE):
        return None
    # NOTE: the sign comes before any code of the candidate, which therefore cannot withhold it.
    how = "timed out" if execution.timed_out else f"return code {execution.return_code}"
    text = _last_line(execution.stderr) or execution.stdout
    raise ServiceFault(f"the program was not started: {how}: {quote(text)}")


def _frames_of(nonce: str, answer: str) -> Iterator[str]:
    prefix = f"{nonce} "
    # NOTE: without what follows the last line's end, which is a frame that was cut.
    for line in answer.split("\n")[:-1]:
        if line.startswith(prefix):
            yield line[len(prefix) :]


def _stop_of(execution: Execution) -> Status | None:
    if execution.timed_out:
        return "output" if len(execution.stdout) >= STALL_BYTES else "timeout"
    code = execution.return_code
    number = -code if code < 0 else code - 128
    if 0 < number <= _SIGNALS:
        return _OF_SIGNAL.get(number, "crash")
    return None


def _last_line(text: str) -> str:
    lines = text.rstrip().splitlines()
    return lines[-1] if lines else ""
