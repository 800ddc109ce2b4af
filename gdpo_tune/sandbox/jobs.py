"""Jobs, which the sandbox runs, and their results.

A field of another type is refused with `TypeError` when an object is made.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import Any, Literal, TypeAlias, cast, get_args

from .guest.grading import CandidateReport
from .guest.protocol import Encoded, ExitStatus, encode

Status: TypeAlias = Literal[
    "passed", "failed", "error", "timeout", "memory", "output", "crash", "violation"
]
"""`passed`: every test. Otherwise the first reason. `failed`: another value, or an assertion.
`error`: a test raised, or the code does not load. `timeout`, `memory`, `output`: the time, memory
or bytes ran out. `crash`: the process died, also by an exit. `violation`: it tried something
forbidden, or forged a message. Faults of the sandbox itself are retried and then raised, never
returned."""
Comparison: TypeAlias = Literal["exact", "apps", "code_contests"]
"""Rule for returned values and printed output, which `guest/grading.py` describes."""
Verdict: TypeAlias = Literal["passed", "failed", "error", "not_run"]
_LEAST_SECONDS = 0.01
"""About what a fork needs before it reads its job."""
_MOST_SECONDS = 86_400.0


@dataclass(frozen=True)
class Call:
    """One test: a call of the candidate's function and the value that it should return.

    Arguments and the expected value are built-in values, containers of such, `Decimal`,
    `Fraction`, or dates. `args` may also be a list.
    """

    function: str
    args: tuple[Any, ...]
    expected: Any

    def __post_init__(self) -> None:
        _require_type("Call.function", self.function, str)
        _require_type("Call.args", self.args, tuple, list)
        object.__setattr__(self, "args", tuple(self.args))


@dataclass(frozen=True)
class Stream:
    """One test in the style of competitive programming: an input and the output for it.

    Each test runs the whole program as `__main__`, with fresh names and streams; the tests of a
    job share its limits. An exception is an error, and so is an exit with another status than 0.

    Raises:
        ValueError: the expected output is empty, so that a program would pass by doing nothing;
            a text is not Unicode; or the tolerance is out of range.
    """

    stdin: str
    expected: str
    tolerance: float = 0.0
    """Largest absolute or relative error of a printed number; 0 compares text."""

    def __post_init__(self) -> None:
        _require_type("Stream.stdin", self.stdin, str)
        _require_type("Stream.expected", self.expected, str)
        _require_type("Stream.tolerance", self.tolerance, float, int)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be from 0 to below 1")
        if not self.expected.split():
            raise ValueError(f"a program that prints nothing passes this test: {self!r}")
        for text in (self.stdin, self.expected):
            # NOTE: refuses a lone surrogate, which JSON would carry to where no test is named.
            text.encode()


@dataclass(frozen=True)
class Limits:
    """Limits of one candidate, for its start and all of its tests together; checked when made."""

    cpu_seconds: float = 1.0
    """From 0.01 to 86,400, as `wall_seconds`."""
    wall_seconds: float = 4.0
    """A backstop for code that sleeps; CPU time is what counts on a busy machine."""
    memory_bytes: int = 512 << 20
    """Address space, 64 MiB to 1 TiB; an idle Python holds about 25 MiB, with numpy 120 MiB."""
    output_bytes: int = 1 << 20
    """Most printed bytes, and most bytes of returned values; up to 1 TiB."""
    test_cpu_seconds: float = _MOST_SECONDS
    """CPU seconds of one call or stream, which has the same share of the wall seconds. A candidate
    that stops this clock still has the others."""

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "test_cpu_seconds"):
            self._require(name, _LEAST_SECONDS, _MOST_SECONDS, float, int)
        for name in ("memory_bytes", "output_bytes"):
            self._require(name, 1, 1 << 40, int)
        if self.memory_bytes < (least := 64 << 20):
            reason = f"memory_bytes is {self.memory_bytes}; Python itself needs {least} (64 MiB)"
            raise ValueError(reason)

    def _require(self, name: str, least: float, most: float, *kinds: type[object]) -> None:
        value = getattr(self, name)
        _require_type(f"Limits.{name}", value, *kinds)
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; it must be from {least:g} to {most:,.0f}")


@dataclass(frozen=True)
class Job:
    """One candidate and its tests, of any iterable: calls and asserts, or streams of a program.

    Raises:
        ValueError: there is no test, so that a candidate would pass by doing nothing; or streams
            are mixed with others. `run_batch` checks that each assert can fail.
    """

    code: str
    calls: tuple[Call, ...] = ()
    asserts: tuple[str, ...] = ()
    """Python statements; `assert f(literals) == literal` is as fast as a `Call`."""
    streams: tuple[Stream, ...] = ()
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    """Seed of the candidate's `random` module."""
    comparison: Comparison = "exact"
    """Of calls and streams."""

    def __post_init__(self) -> None:
        _require_type("Job.code", self.code, str)
        _require_type("Job.limits", self.limits, Limits)
        _require_type("Job.seed", self.seed, int)
        if self.comparison not in get_args(Comparison):
            raise ValueError(f"{self.comparison!r} is none of {', '.join(get_args(Comparison))}")
        for name, kind in (("calls", Call), ("asserts", str), ("streams", Stream)):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"Job.{name} must hold tests, not be one text: {value[:80]!r}")
            # NOTE: stored before any use, because an iterator yields its tests only once.
            tests = tuple(value)
            for index, test in enumerate(tests):
                _require_type(f"Job.{name}[{index}]", test, kind)
            object.__setattr__(self, name, tests)
        if not self.calls and not self.asserts and not self.streams:
            raise ValueError("a job without a test would pass whatever the candidate does")
        if self.streams and (self.calls or self.asserts):
            raise ValueError("a program with streams is not called: split this into two jobs")


@dataclass(frozen=True)
class Result:
    """Outcome of one job."""

    status: Status
    verdicts: tuple[Verdict, ...]
    """One per test: calls, then asserts; or streams. A job stops at the first without an answer."""
    cpu_seconds: float
    untrusted_detail: str
    """Written by the candidate: show it as text, never interpret it."""

    @property
    def passed(self) -> bool:
        """True if every test passed."""
        return self.status == "passed"

    @property
    def share(self) -> float:
        """Share of the tests that passed, 1.0 only where `passed`; a violation earns nothing.

        A candidate that ended badly after its last answer loses that test.
        """
        if self.passed or self.status == "violation":
            return float(self.passed)
        count = len(self.verdicts)
        return min(self.verdicts.count("passed"), count - 1) / count

    @property
    def has_bug(self) -> bool:
        """True if the code does not load, a test raised, or a limit or rule was broken."""
        return self.status not in ("passed", "failed") or "error" in self.verdicts


@dataclass(frozen=True)
class SandboxInfo:
    """Isolation of candidates on this machine."""

    tier: Literal["full", "seccomp+landlock", "seccomp+namespaces", "seccomp", "unsafe"]
    """`full` has namespaces and Landlock around the seccomp filter of every tier; `unsafe` has no
    layer."""
    layers: tuple[str, ...]


def _require_type(name: str, value: object, *kinds: type[object]) -> None:
    # NOTE: True and False are whole numbers to Python, and never meant as such here.
    if isinstance(value, bool) or not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {expected}, not {type(value).__name__}")


@contextmanager
def name_in_errors(subject: str) -> Generator[None, None, None]:
    """Name the job or test that is refused in front of the reason."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{subject}: {error}") from error


_SIGKILL = 9
_OF_SIGNAL: dict[int, Status] = {_SIGKILL: "memory", 24: "timeout", 25: "output", 31: "violation"}
"""SIGKILL, SIGXCPU, SIGXFSZ and SIGSYS by Linux's numbers, which Windows does not name."""
_TEST_CLOCKS = (14, 27)
"""SIGALRM and SIGPROF, which end a test that has a time limit of its own."""
_OF_STOP: dict[str, Status] = {
    "output": "output",
    "malformed": "violation",
    "overload": "timeout",
    "ended": "crash",
}


class InfraFault(Exception):
    """Failure of the sandbox, not the candidate's: the job is tried again."""


def conclude(report: CandidateReport, ending: ExitStatus, tests: int, limits: Limits) -> Result:
    """Return the result by the verdicts and by how the candidate ended.

    Raises:
        InfraFault: the candidate never started, or was killed from outside.
    """
    # NOTE: a clock that ran out before the start was set too low, for the job or for its tests.
    timed_out = ending.timed_out or report.stop == "overload"
    if not report.started and not timed_out:
        raise InfraFault(
            "the process of the candidate, or of its tests, ended before it was locked: no memory "
            f"on this machine, or too little in {limits}?"
        )
    answered = cast("list[Verdict]", report.verdicts)
    # NOTE: the first test without an answer is an error, and the rest did not run.
    unanswered: tuple[Verdict, ...] = ("error", *repeat("not_run", tests))
    verdicts = (*answered, *unanswered[: tests - len(answered)])
    status = _decide_status(report, ending, verdicts, limits)
    return Result(status, verdicts, ending.cpu_seconds, report.detail)


def _decide_status(
    report: CandidateReport, ending: ExitStatus, verdicts: tuple[Verdict, ...], limits: Limits
) -> Status:
    if ending.timed_out:
        return "timeout"
    if ending.signal:
        # NOTE: a candidate cannot send signals: the kernel was short of memory, or an outsider did.
        if ending.signal == _SIGKILL and ending.peak_bytes < limits.memory_bytes // 2:
            raise InfraFault("the candidate's process was killed from outside")
        if ending.signal in _TEST_CLOCKS and limits.test_cpu_seconds < limits.cpu_seconds:
            return "timeout"
        return _OF_SIGNAL.get(ending.signal, "crash")
    if report.memory:
        return "memory"
    for verdict in verdicts:
        if verdict != "passed":
            first: Status = "failed" if verdict == "failed" else "error"
            return _OF_STOP.get(report.stop or "", first)
    return _OF_STOP.get(report.stop or "", "passed")


def encode_tests(tests: Iterable[Call | str]) -> list[list[Encoded]]:
    """Encode each test as `["call", function, arguments, expected]` or `["assert", source]`.

    Raises:
        ValueError: a test is not Python, cannot fail, or holds a value nested too deeply.
        TypeError: a call holds a value that cannot be sent.
    """
    encoded: list[list[Encoded]] = []
    for number, test in enumerate(tests):
        with name_in_errors(f"test {number}"):
            call = read_assert(test) if isinstance(test, str) else test
            if call is None:
                encoded.append(["assert", test])
                continue
            arguments: Encoded = [encode(argument, strict=True) for argument in call.args]
            encoded.append(["call", call.function, arguments, encode(call.expected, strict=True)])
    return encoded


@lru_cache(maxsize=4096)
def read_assert(source: str) -> Call | None:
    """Turn `assert f(literals) == literal` into a call; return None for any other test.

    Raises:
        ValueError: the source is not Python, or nothing in it can fail.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test is not Python: {source!r}: {error}") from error
    if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
        raise ValueError(f"nothing in this test can fail: {source!r}")
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            return _build_call(left, right) or _build_call(right, left)
        case _:
            return None


def _build_call(call: ast.expr, expected: ast.expr) -> Call | None:
    match call:
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
            with suppress(ValueError, TypeError, MemoryError, RecursionError):
                values = tuple(ast.literal_eval(argument) for argument in arguments)
                literal = ast.literal_eval(expected)
                encode([values, literal], strict=True)
                return Call(function, values, literal)
        case _:
            pass
    return None
