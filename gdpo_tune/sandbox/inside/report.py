"""What is known of one candidate, and how each of its frames adds to that."""

from __future__ import annotations

from dataclasses import dataclass, field

from .comparison import matches
from .encoding import Encoded, parse

FORGED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading a frame raises that no candidate's runner has written."""
_MAX_DETAIL = 300


@dataclass
class Report:
    """What the trainer learns of one job; see the top of `judge`."""

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


def weigh_value(expected: object, frame: bytes, report: Report) -> None:
    """Give the test of one call its verdict.

    Raises:
        FORGED: no runner has written this frame.
    """
    match parse(frame):
        case ["value", received]:
            report.add("passed" if matches(expected, received) else "failed")
        case other:
            weigh_other(other, report)


def weigh_other(frame: Encoded, report: Report) -> None:
    """Take in a frame that holds no result."""
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
