"""The process that alone holds expected values: it compares and never runs a candidate.

A request brings one end of a candidate's socket and either expected values, with which the
judge compares what it reads, or tests in Python, for which it forks a locked checker. The
answer is a report:

    started   the candidate was locked and about to read its job
    stop      why there are no more verdicts: load, output, ended, malformed, overload; or null
    verdicts  one a test that has one
    memory    a test, or the code itself, ran out of memory
    detail    untrusted text about the first test that was not passed
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NoReturn

from . import checker
from .comparison import matches
from .control import receive_with_descriptor, serve
from .enclosure import Enclosure
from .encoding import Encoded, decode, parse
from .frames import HEADER, READY, FrameTooLong, pack, read_exactly, read_frame, write_all
from .supervision import Allowance, fork_locked, supervise

_MAX_REQUEST_BYTES = 1 << 30
_MAX_DETAIL = 300
_PATIENCE = 5.0
"""CPU seconds for one comparison: a hundred times what the longest honest answer takes."""
_MAX_MEMORY = 2 << 30
_FORGED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading a frame raises that no candidate's runner has written."""


class Overload(Exception):
    """A received value takes too long to compare."""


@dataclass
class Report:
    """What the trainer learns of one job; see the top of this file."""

    started: bool = False
    stop: str | None = None
    verdicts: list[str] = field(default_factory=list[str])
    memory: bool = False
    detail: str = ""

    def add(self, verdict: str, error: str = "", text: str = "") -> None:
        """One more test has a verdict."""
        self.verdicts.append(verdict)
        self.note(error, text)

    def note(self, error: str, text: str) -> None:
        """Keep the first error, as text that nobody may trust."""
        self.memory |= error == "MemoryError"
        if error and not self.detail:
            self.detail = f"{error}: {text}"[:_MAX_DETAIL]


def main(descriptor: int, parent: int) -> None:
    """Judge one candidate after the other until the trainer closes the socket."""
    serve(descriptor, parent, _answer, _prepare)


def _prepare() -> None:
    signal.signal(signal.SIGPROF, _give_up)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, hard))


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
    printable, expected, tests, limits = request
    if tests is None:
        _compare(partial(os.read, candidate), decode(expected), printable, report)
    else:
        _check(tests, printable, Allowance(*limits), candidate, report, control, enclosure)


def _compare(
    receive: Callable[[int], bytes], expected: list[object], limit: int, report: Report
) -> None:
    for value in expected:
        try:
            frame = read_frame(receive, limit)
        except FrameTooLong:
            report.stop = "output"
            return
        limit -= len(frame)
        signal.setitimer(signal.ITIMER_PROF, _PATIENCE)
        try:
            _weigh(value, parse(frame), report)
        except (Overload, MemoryError):
            report.stop = "overload"
        except _FORGED:
            report.stop = "malformed"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if report.stop is not None:
            return


def _weigh(expected: object, frame: Encoded, report: Report) -> None:
    match frame:
        case ["value", received]:
            report.add("passed" if matches(expected, received) else "failed")
        case ["raise", str() as error, str() as text]:
            report.add("error", error, text)
        case ["load", str() as error, str() as text]:
            report.note(error, text)
            report.stop = "load"
        case ["output"]:
            report.stop = "output"
        case _:
            report.stop = "malformed"


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
    child = fork_locked(allowance, enclosure.filter, [sending, candidate], program)
    os.close(sending)
    try:
        ending = supervise(child, allowance, control.fileno())
        _read_verdicts(partial(os.read, receiving), report)
    finally:
        os.close(receiving)
    if ending.timed_out:
        report.stop = "overload"


def _read_verdicts(receive: Callable[[int], bytes], report: Report) -> None:
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
