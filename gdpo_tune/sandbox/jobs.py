"""What the sandbox is asked and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal[
    "passed", "failed", "error", "timeout", "memory", "output", "crash", "violation", "infra"
]
"""`passed`: every test. Else the first reason: a test `failed` (another value, an assertion)
or raised (`error`, also for code that does not load), a clock ran out (`timeout`), `memory`
or the allowance of bytes (`output`) did, the process died (`crash`, also by an exit), or it
reached for what is forbidden or forged a message (`violation`). `infra`, the sandbox's own
fault, is retried and then raised, never returned."""
Verdict: TypeAlias = Literal["passed", "failed", "error", "not_run"]


@dataclass(frozen=True)
class Call:
    """One test: call a function of the candidate and compare what it returns.

    Arguments and the expected value are built-in values, containers of such, `Decimal`,
    `Fraction`, or dates. The comparison is Python's `==`, except that an expected float allows
    a relative error of 1e-9 and that NaN meets NaN.
    """

    function: str
    args: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class Limits:
    """What one candidate may use, its start and every test together."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 4.0
    """A backstop for code that sleeps; CPU time is what counts on a busy machine."""
    memory_bytes: int = 512 << 20
    """Address space, of which an idle Python holds about 25 MiB."""
    output_bytes: int = 1 << 20
    """Bytes that it may print, and bytes of the values that it may return."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive number")


@dataclass(frozen=True)
class Job:
    """One candidate and its tests, calls first.

    Raises:
        ValueError: there is no test, or an `assert` test that cannot fail, because a candidate
            would pass by doing nothing.
    """

    code: str
    calls: tuple[Call, ...] = ()
    asserts: tuple[str, ...] = ()
    """Python statements; `assert f(literals) == literal` is as fast as a `Call`."""
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    """Seed of the candidate's `random` module."""

    def __post_init__(self) -> None:
        if not self.calls and not self.asserts:
            raise ValueError("a job without a test would pass whatever the candidate does")


@dataclass(frozen=True)
class Result:
    """What became of one job."""

    status: Status
    verdicts: tuple[Verdict, ...]
    """One a test: calls, then asserts. A job stops at the first test that has no answer."""
    cpu_seconds: float
    untrusted_detail: str
    """Written by the candidate: show it as text, never interpret it."""

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return self.status == "passed"


@dataclass(frozen=True)
class SandboxInfo:
    """How candidates are locked in on this machine."""

    tier: Literal["full", "seccomp+landlock", "seccomp+namespaces", "seccomp"]
    """`full` has namespaces and Landlock around the seccomp filter that every tier has."""
    layers: tuple[str, ...]
