"""The process that alone holds expected values: it compares and never runs a candidate.

A request brings one end of a candidate's socket, and expected values or tests in Python. The judge
compares what it reads with the values; for tests it forks a locked checker:

    [bytes, "values", values, rule]      expected results of calls
    [bytes, "streams", pairs, rule]      expected output of a program, and its tolerance
    [bytes, "tests", tests, *allowance]  see `checker.run_tests` and `Allowance`

The first field is the most that the candidate may send altogether. A rule is one of `grading`. The
answer is a report:

    started   the candidate was locked and about to read its job
    stop      why there are no more verdicts: load, output, ended, malformed, overload; or null
    verdicts  one per test that has one
    memory    a test, or the code itself, ran out of memory
    detail    untrusted text about the first test that did not pass
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import NoReturn

from . import checker
from .grading import CandidateReport, grade_frames, grade_output, grade_value
from .lockdown import Isolation, cap_at_hard_limit
from .protocol import (
    HEADER,
    READY,
    Allowance,
    Encoded,
    decode,
    pack_frame,
    parse,
    read_exactly,
    read_frame,
    write_all,
)
from .supervision import fork_with_limits, receive_with_descriptor, supervise_fork

_COMPARISON_SECONDS = 5.0
"""CPU seconds for a job's comparisons: a hundred times what the longest honest answers take."""


class Overload(Exception):
    """A received value takes too long to compare."""


def _prepare() -> None:
    signal.signal(signal.SIGPROF, _raise_overload)
    soft = cap_at_hard_limit(resource.RLIMIT_AS, 2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _raise_overload(number: int, frame: object) -> NoReturn:
    raise Overload


def _answer(control: socket.socket, isolation: Isolation) -> None:
    head, candidate = receive_with_descriptor(control, HEADER.size)
    limit, kind, tests, *rest = parse(read_exactly(control.recv, HEADER.unpack(head)[0]))
    report = CandidateReport()
    receive = partial(os.read, candidate)
    try:
        if read_exactly(receive, len(READY)) == READY:
            report.started = True
            if kind == "tests":
                program = partial(checker.run_tests, tests, limit)
                _check(program, Allowance(*rest), candidate, report, control, isolation)
            else:
                _compare(receive, kind, tests, limit, report, *rest)
    except (EOFError, OSError):
        report.stop = "ended"
    finally:
        os.close(candidate)
    write_all(control.fileno(), pack_frame(json.dumps(asdict(report)).encode()))


def _compare(
    receive: Callable[[int], bytes],
    kind: str,
    tests: Encoded,
    limit: int,
    report: CandidateReport,
    rule: str,
) -> None:
    expected, grade = (decode(tests), grade_value) if kind == "values" else (tests, grade_output)
    # NOTE: this timer counts CPU time, so that a slow candidate does not use it up.
    signal.setitimer(signal.ITIMER_PROF, _COMPARISON_SECONDS)
    try:
        grade_frames(receive, expected, limit, report, partial(grade, rule=rule))
    except (Overload, MemoryError):
        report.stop = "overload"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _check(
    program: Callable[[], NoReturn],
    allowance: Allowance,
    candidate: int,
    report: CandidateReport,
    control: socket.socket,
    isolation: Isolation,
) -> None:
    receiving, sending = os.pipe()
    child = fork_with_limits(allowance, isolation.seccomp, [sending, candidate], program)
    os.close(sending)
    try:
        ending = supervise_fork(child, allowance, control.fileno())
        # NOTE: a checker that is killed at a limit may have sent some verdicts, and half of one.
        with contextlib.suppress(*([EOFError] if ending.timed_out else [])):
            _read_verdicts(partial(os.read, receiving), report)
    finally:
        os.close(receiving)
    if ending.timed_out:
        report.stop = "overload"


def _read_verdicts(receive: Callable[[int], bytes], report: CandidateReport) -> None:
    # NOTE: from here on of the checker: its tests have no verdict if it ends before it is locked.
    report.started = False
    report.started = read_exactly(receive, len(READY)) == READY
    while True:
        match parse(read_frame(receive, limit=1 << 30)):
            case ["test", verdict, error, text]:
                report.add(verdict, error, text)
            case ["stop", reason, error, text]:
                report.note(error, text)
                report.stop = reason
                return
            case _:
                return


ROLE = _answer, _prepare
"""Work of this process for each request, and before it is locked, as `launch` calls it."""
