"""What the sandbox is asked and what it answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

Status: TypeAlias = Literal[
    "passed", "failed", "error", "timeout", "memory", "output", "crash", "violation"
]
"""`passed`: every test. Else the first reason: a test `failed` (another value, an assertion)
or raised (`error`, also for code that does not load), a clock ran out (`timeout`), `memory`
or the allowance of bytes (`output`) did, the process died (`crash`, also by an exit), or it
reached for what is forbidden or forged a message (`violation`). The sandbox's own
faults are retried and then raised, never returned."""
_LEAST_MEMORY = 64 << 20
_MOST_BYTES = 1 << 40
_LEAST_SECONDS = 0.01
"""About what a fork needs before it looks at its job."""
_MOST_SECONDS = 86_400.0
Verdict: TypeAlias = Literal["passed", "failed", "error", "not_run"]


@dataclass(frozen=True)
class Call:
    """One test: call a function of the candidate and compare what it returns.

    Arguments and the expected value are built-in values, containers of such, `Decimal`,
    `Fraction`, or dates. The comparison is Python's `==`, except that an expected float allows
    a relative error of 1e-9, or an absolute one of 1e-12 where it is 0.0, and that NaN meets NaN.

    Raises:
        TypeError: a field is of another type; `args` may also be a list.
    """

    function: str
    args: tuple[Any, ...]
    expected: Any

    def __post_init__(self) -> None:
        _require("Call.function", self.function, str)
        _require("Call.args", self.args, tuple, list)
        object.__setattr__(self, "args", tuple(self.args))


@dataclass(frozen=True)
class Stream:
    """One test in the style of competitive programming: run the program, compare what it prints.

    Each test is a run of the whole program as `__main__`, with fresh names and streams; the tests
    of a job share its limits. Lines are compared token by token, so blanks do not matter, nor do
    empty lines at the end. An exception is an error, and so is an exit with a status but 0.

    Raises:
        ValueError: the expected output is empty, so that a program would pass by doing nothing;
            a text is no Unicode; or the tolerance is none.
        TypeError: a field is of another type.
    """

    stdin: str
    expected: str
    tolerance: float = 0.0
    """Largest absolute or relative error of a printed number; 0 compares text."""

    def __post_init__(self) -> None:
        _require("Stream.stdin", self.stdin, str)
        _require("Stream.expected", self.expected, str)
        _require("Stream.tolerance", self.tolerance, float, int)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be from 0 to below 1")
        if not self.expected.split():
            raise ValueError(f"a program that prints nothing passes this test: {self!r}")
        for text in (self.stdin, self.expected):
            # NOTE: a lone surrogate, which JSON would carry to where nobody can say what is wrong.
            text.encode()


@dataclass(frozen=True)
class Limits:
    """What one candidate may use, its start and every test together.

    Raises:
        ValueError: a limit is none that a process can be given.
        TypeError: a limit is no number, or bytes are no whole number.
    """

    cpu_seconds: float = 1.0
    """From 0.01 to 86,400, as `wall_seconds`."""
    wall_seconds: float = 4.0
    """A backstop for code that sleeps; CPU time is what counts on a busy machine."""
    memory_bytes: int = 512 << 20
    """Address space, 64 MiB to 1 TiB; an idle Python holds about 25 MiB, with numpy 120 MiB."""
    output_bytes: int = 1 << 20
    """Bytes that it may print, and bytes of the values that it may return; up to 1 TiB."""

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds"):
            _require(f"Limits.{name}", getattr(self, name), float, int)
            self._require_range(name, _LEAST_SECONDS, _MOST_SECONDS)
        for name in ("memory_bytes", "output_bytes"):
            _require(f"Limits.{name}", getattr(self, name), int)
            self._require_range(name, 1, _MOST_BYTES)
        if self.memory_bytes < _LEAST_MEMORY:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes}; Python itself needs {_LEAST_MEMORY} (64 MiB)"
            )

    def _require_range(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; it must be from {least:g} to {most:,.0f}")


@dataclass(frozen=True)
class Job:
    """One candidate and its tests: calls and asserts of a module, or streams of a program.

    Raises:
        ValueError: there is no test, so that a candidate would pass by doing nothing; or streams
            are mixed with calls or asserts. Whether each of the asserts can fail is checked
            when a batch is run.
        TypeError: a field is of another type. Tests may come from anything that can be gone
            through, but a single text is no tuple of asserts.
    """

    code: str
    calls: tuple[Call, ...] = ()
    asserts: tuple[str, ...] = ()
    """Python statements; `assert f(literals) == literal` is as fast as a `Call`."""
    streams: tuple[Stream, ...] = ()
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    """Seed of the candidate's `random` module."""

    def __post_init__(self) -> None:
        _require("Job.code", self.code, str)
        _require("Job.limits", self.limits, Limits)
        _require("Job.seed", self.seed, int)
        for name, kind in (("calls", Call), ("asserts", str), ("streams", Stream)):
            self._keep(name, kind)
        if not self.calls and not self.asserts and not self.streams:
            raise ValueError("a job without a test would pass whatever the candidate does")
        if self.streams and (self.calls or self.asserts):
            raise ValueError("a program with streams is not called: split this into two jobs")

    def _keep(self, name: str, kind: type[object]) -> None:
        given = getattr(self, name)
        if isinstance(given, str):
            raise TypeError(f"Job.{name} must hold tests, not be one text: {given[:80]!r}")
        # NOTE: before anything looks at them, because what can be gone through once would be spent.
        tests = tuple(given)
        for index, test in enumerate(tests):
            _require(f"Job.{name}[{index}]", test, kind)
        object.__setattr__(self, name, tests)


@dataclass(frozen=True)
class Result:
    """What became of one job."""

    status: Status
    verdicts: tuple[Verdict, ...]
    """One a test: calls, then asserts; or streams. A job stops at the first without an answer."""
    cpu_seconds: float
    untrusted_detail: str
    """Written by the candidate: show it as text, never interpret it."""

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return self.status == "passed"

    @property
    def share(self) -> float:
        """Share of the tests that passed, 1.0 only where `passed`.

        A candidate that reached for what is forbidden has earned nothing; one that came to a bad
        end after its last answer lacks that test.
        """
        if self.passed or self.status == "violation":
            return float(self.passed)
        count = len(self.verdicts)
        return min(self.verdicts.count("passed"), count - 1) / count

    @property
    def bug(self) -> bool:
        """Whether it does not load, some test raised, or a limit or a rule of the sandbox broke."""
        return self.status not in ("passed", "failed") or "error" in self.verdicts


@dataclass(frozen=True)
class SandboxInfo:
    """How candidates are locked in on this machine."""

    tier: Literal["full", "seccomp+landlock", "seccomp+namespaces", "seccomp", "external", "unsafe"]
    """`full` has namespaces and Landlock around the seccomp filter that every local tier has;
    `external` is a service that isolates as it sees fit; `unsafe` is none at all."""
    layers: tuple[str, ...]


class Sandbox(Protocol):
    """What every sandbox offers: the local one, an external service, and the unsafe one."""

    @property
    def info(self) -> SandboxInfo:
        """Which isolation is in force."""
        ...

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """One result a job, in order; see `CodeSandbox.run_batch` for what it raises."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


def _require(name: str, value: object, *kinds: type[object]) -> None:
    # NOTE: True and False are whole numbers to Python, and never meant as such here.
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


@contextmanager
def naming(place: str) -> Generator[None, None, None]:
    """Put the place of what is refused in front of the reason."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
