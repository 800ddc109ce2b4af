"""Report about one candidate: its verdicts, and how each of its frames adds to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .encoding import Encoded, parse
from .equality import is_same_output, list_tuples, matches
from .frames import PRINTED, FrameTooLong, read_frame

FORGED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions of reading a frame that no honest runner wrote."""
_MAX_DETAIL = 300


@dataclass
class CandidateReport:
    """The judge's answer about one candidate; `judge` describes the fields."""

    started: bool = False
    stop: str | None = None
    verdicts: list[str] = field(default_factory=list[str])
    memory: bool = False
    detail: str = ""

    def add(self, verdict: str, error: str = "", text: str = "") -> None:
        """Add the verdict of the next test."""
        self.verdicts.append(verdict)
        self.note(error, text)

    def note(self, error: str, text: str) -> None:
        """Keep the first error, as untrusted text."""
        self.memory |= error == "MemoryError"
        if error and not self.detail:
            self.detail = f"{error}: {text}"[:_MAX_DETAIL]


def grade_frames(
    receive: Callable[[int], bytes],
    expected: Sequence[Any],
    limit: int,
    report: CandidateReport,
    grade: Callable[[Any, bytes, CandidateReport], None],
) -> None:
    """Read one frame per expected value, at most `limit` bytes together, and grade it.

    The report gets the verdicts, and the reason why there are no more. `grade` is `grade_value`
    or `grade_output`.
    """
    try:
        for value in expected:
            frame = read_frame(receive, limit)
            limit -= len(frame)
            grade(value, frame, report)
            if report.stop is not None:
                return
    except (EOFError, OSError):
        report.stop = "ended"
    except FrameTooLong:
        report.stop = "output"
    except FORGED:
        report.stop = "malformed"


def grade_value(expected: object, frame: bytes, report: CandidateReport, rule: str) -> None:
    """Add the verdict of one call.

    Raises:
        FORGED: no honest runner wrote this frame.
    """
    match parse(frame):
        case ["value", received]:
            received = received if rule == "exact" else list_tuples(received)
            is_same = matches(expected, received)
            if rule == "apps" and not is_same and isinstance(expected, list) and expected:
                is_same = matches(expected[0], received)
            report.add("passed" if is_same else "failed")
        case other:
            _add_other(other, report)


def grade_output(
    expected: tuple[str, float], frame: bytes, report: CandidateReport, rule: str
) -> None:
    """Add the verdict of one run of a program, as `grade_value` does.

    `expected` is its output and the tolerance.
    """
    if frame[:1] != PRINTED:
        _add_other(parse(frame), report)
        return
    text, tolerance = expected
    is_same = is_same_output(text.encode(), frame[1:], tolerance, rule)
    report.add("passed" if is_same else "failed")


def _add_other(frame: Encoded, report: CandidateReport) -> None:
    match frame:
        case ["raise", str() as error, str() as text, *_]:
            report.add("error", error, text)
        case ["load", str() as error, str() as text]:
            report.note(error, text)
            report.stop = "load"
        case ["output"]:
            report.stop = "output"
        case _:
            report.stop = "malformed"
