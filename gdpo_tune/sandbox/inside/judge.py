"""The process that alone holds expected values: it compares and never runs a candidate.

A request brings one end of a candidate's socket and either expected values, with which the
judge compares what it reads, or tests in Python, for which it forks a locked checker:

    [bytes, "values", values]          what calls should return
    [bytes, "streams", pairs]          what a program should print, and its tolerance
    [bytes, "tests", tests, *limits]   see `checker.run` and `Allowance`

The first is what the candidate may send altogether. The answer is a report:

    started   the candidate was locked and about to read its job
    stop      why there are no more verdicts: load, output, ended, malformed, overload; or null
    verdicts  one a test that has one
    memory    a test, or the code itself, ran out of memory
    detail    untrusted text about the first test that was not passed
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
from typing import Any, NoReturn

from . import checker
from .control import receive_with_descriptor, serve
from .enclosure import Enclosure, within_hard_limit
from .encoding import Encoded, decode, parse
from .frames import HEADER, READY, FrameTooLong, pack, read_exactly, read_frame, write_all
from .report import FORGED, Report, weigh_other, weigh_value
from .streams import PRINTED
from .supervision import Allowance, fork_limited, supervise
from .tokens import same_output

_MAX_REQUEST_BYTES = 1 << 30
_PATIENCE = 5.0
"""CPU seconds for a job's comparisons: a hundred times what the longest honest answers take."""
_MAX_MEMORY = 2 << 30


class Overload(Exception):
    """A received value takes too long to compare."""


def main(descriptor: int, parent: int, isolated: bool, modules: list[str]) -> None:
    """Judge one candidate after the other until the trainer closes the socket."""
    serve(descriptor, parent, isolated, modules, _answer, _prepare)


def _prepare() -> None:
    signal.signal(signal.SIGPROF, _give_up)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = within_hard_limit(resource.RLIMIT_AS, _MAX_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _give_up(number: int, frame: object) -> NoReturn:
    raise Overload


def _answer(control: socket.socket, enclosure: Enclosure) -> None:
    head, candidate = receive_with_descriptor(control, HEADER.size)
    request = parse(read_exactly(control.recv, HEADER.unpack(head)[0]))
    report = Report()
    receive = partial(os.read, candidate)
    try:
        if read_exactly(receive, len(READY)) == READY:
            report.started = True
            _judge(request, candidate, report, control, enclosure)
    except (EOFError, OSError):
        report.stop = "ended"
    finally:
        os.close(candidate)
    write_all(control.fileno(), pack(json.dumps(asdict(report)).encode()))


def _judge(
    request: Encoded, candidate: int, report: Report, control: socket.socket, enclosure: Enclosure
) -> None:
    limit, kind, tests, *limits = request
    if kind == "tests":
        _check(tests, limit, Allowance(*limits), candidate, report, control, enclosure)
        return
    weigh = weigh_value if kind == "values" else _weigh_output
    expected = decode(tests) if kind == "values" else tests
    # NOTE: counts CPU time, so that a slow candidate does not use it up.
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE)
    try:
        _compare(partial(os.read, candidate), expected, limit, report, weigh)
    except FrameTooLong:
        report.stop = "output"
    except (Overload, MemoryError):
        report.stop = "overload"
    except FORGED:
        report.stop = "malformed"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compare(
    receive: Callable[[int], bytes],
    expected: list[Any],
    limit: int,
    report: Report,
    weigh: Callable[[Any, bytes, Report], None],
) -> None:
    for value in expected:
        frame = read_frame(receive, limit)
        limit -= len(frame)
        weigh(value, frame, report)
        if report.stop is not None:
            return


def _weigh_output(expected: Encoded, frame: bytes, report: Report) -> None:
    if frame[:1] != PRINTED:
        weigh_other(parse(frame), report)
        return
    text, tolerance = expected
    same = same_output(text.encode(), frame[1:], tolerance)
    report.add("passed" if same else "failed")


def _check(
    tests: list[Encoded],
    printable: int,
    allowance: Allowance,
    candidate: int,
    report: Report,
    control: socket.socket,
    enclosure: Enclosure,
) -> None:
    receiving, sending = os.pipe()
    program = partial(checker.run, tests, printable)
    child = fork_limited(allowance, enclosure.seccomp, [sending, candidate], program)
    os.close(sending)
    try:
        ending = supervise(child, allowance, control.fileno())
        # NOTE: one that is killed at a limit may have sent some verdicts, and half of another.
        with contextlib.suppress(*([EOFError] if ending.timed_out else [])):
            _read_verdicts(partial(os.read, receiving), report)
    finally:
        os.close(receiving)
    if ending.timed_out:
        report.stop = "overload"


def _read_verdicts(receive: Callable[[int], bytes], report: Report) -> None:
    # NOTE: now of the checker, whose tests have no verdict either if it ends before it is locked.
    report.started = False
    report.started = read_exactly(receive, len(READY)) == READY
    while True:
        match parse(read_frame(receive, _MAX_REQUEST_BYTES)):
            case ["test", verdict, error, text]:
                report.add(verdict, error, text)
            case ["stop", reason, error, text]:
                report.note(error, text)
                report.stop = reason
                return
            case _:
                return
