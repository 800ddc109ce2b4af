"""Report about one candidate, and the comparison of its results with what tests expect.

Values are compared by Python's `==` between built-in values, with two deviations. An expected
float allows a relative error of 1e-9, or an absolute one of 1e-12 where it is exactly 0.0; and an
expected NaN equals NaN. The comparison follows the expected value, which is trusted: it never
builds a container from the received one, and never reads more of it than the expected value has.

Printed output is compared line by line and token by token, as bytes. The work grows linearly with
the length of both sides, whatever they hold.

Rules of benchmarks, each as its judge has it:

    code_contests  `OutputsMatch`, execution/tester_sandboxer.cc of google-deepmind/code_contests:
                   tokens between any white space, letters of any case, numbers within 1e-5
    apps           eval/testing_util.py of hendrycks/apps: tuples are lists, and a value may be the
                   first item of the expected list; blank lines do not matter, and numbers with a
                   point are close as in `np.allclose`. It also takes the words of a line in any
                   order and whole numbers within 1e-5 of their size; these are wrong here.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from .protocol import (
    PRINTED,
    Encoded,
    FrameTooLong,
    Tagged,
    decode,
    decode_parts,
    parse,
    read_frame,
)

FORGED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions of reading a frame that no honest runner wrote."""
COMPARISON_SECONDS = 5.0
"""CPU seconds for a job's comparisons: a hundred times what the longest honest answers take."""
_comparison = threading.local()
"""`end` is the CPU time of this thread at which its comparisons have taken too long."""


class Overload(Exception):
    """A received value takes too long to compare."""


@dataclass
class CandidateReport:
    """Verdicts on one candidate, as far as it answered."""

    started: bool = False
    """True if it was locked and about to read its job."""
    stop: str | None = None
    """Why there are no more verdicts: load, output, ended, malformed or overload."""
    verdicts: list[str] = field(default_factory=list[str])
    """One per test that has one."""
    memory: bool = False
    """True if a test, or the code itself, ran out of memory."""
    detail: str = ""
    """Untrusted text about the first test that did not pass."""

    def add(self, verdict: str, error: str = "", text: str = "") -> None:
        """Add the verdict of the next test."""
        self.verdicts.append(verdict)
        self.note(error, text)

    def note(self, error: str, text: str) -> None:
        """Keep the first error, as untrusted text."""
        self.memory |= error == "MemoryError"
        if error and not self.detail:
            self.detail = f"{error}: {text}"[:300]


def grade_frames(
    receive: Callable[[int], bytes],
    expected: Sequence[Any],
    limit: int,
    report: CandidateReport,
    grade: Callable[[Any, bytes, CandidateReport], None],
) -> None:
    """Read one frame per expected value, at most `limit` bytes together, and report its verdict.

    `grade` is `grade_value` or `grade_output`. OSErrors other than a lost connection pass.
    """
    _comparison.end = time.thread_time() + COMPARISON_SECONDS
    try:
        for value in expected:
            frame = read_frame(receive, limit)
            limit -= len(frame)
            grade(value, frame, report)
            if report.stop is not None:
                return
    except (EOFError, ConnectionError):
        report.stop = "ended"
    except Overload:
        report.stop = "overload"
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
    """Add the verdict of one run of a program by its expected output and the tolerance."""
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


RELATIVE_TOLERANCE = 1e-9
TOLERANCE_AT_ZERO = 1e-12
_SCALAR_TAGS = frozenset(
    ("int", "float", "bytes", "complex", "decimal", "datetime", "date", "timedelta")
)
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LONGEST_NUMBER = 400
"""Digits of the largest finite float and some more; a longer token is compared as text."""
_MISSING = object()


def matches(expected: object, received: Encoded) -> bool:
    """Return whether an encoded value, as `protocol.parse` reads it, is the expected one.

    Raises:
        ValueError, TypeError, ArithmeticError: `received` is not an encoded value.
    """
    if isinstance(expected, list):
        return type(received) is list and _all_match(expected, received)
    if isinstance(expected, (set, frozenset)):
        payload = _read_payload(received, "set", "frozenset")
        return payload is not None and _dict_matches(
            dict.fromkeys(expected), [(item, None) for item in payload]
        )
    if isinstance(expected, tuple):
        payload = _read_payload(received, "tuple")
        return payload is not None and _all_match(expected, payload)
    if isinstance(expected, dict):
        payload = _read_payload(received, "dict")
        return payload is not None and _dict_matches(expected, payload)
    if isinstance(received, Tagged) and received.tag == "fraction":
        # NOTE: reducing a foreign fraction takes quadratic time, so it is not built.
        numerator, denominator = decode_parts(received.payload)
        if isinstance(expected, (int, Fraction)):
            return (expected.numerator, expected.denominator) == (numerator, denominator)
        return isinstance(expected, float) and _is_close(expected, numerator / denominator)
    return _is_scalar(received) and scalar_matches(expected, decode(received))


def list_tuples(received: Encoded) -> Encoded:
    """Return an encoded value whose tuples are lists, but for keys and members of sets."""
    match received:
        case list(items) | Tagged("tuple", list(items)):
            return [list_tuples(item) for item in items]
        case Tagged("dict", list(pairs)):
            return Tagged("dict", [[key, list_tuples(value)] for key, value in pairs])
        case _:
            return received


def scalar_matches(expected: object, received: object) -> bool:
    """Return whether two values that hold no others are equal."""
    # NOTE: a decimal or a float of this size takes quadratic time to make, or does not exist.
    is_long = isinstance(received, int) and received.bit_length() > 1 << 16
    if is_long and not isinstance(expected, int):
        return False
    if isinstance(expected, float):
        return isinstance(received, (bool, int, float)) and _is_close(expected, received)
    if isinstance(expected, complex):
        return (
            isinstance(received, (bool, int, float, complex))
            and _is_close(expected.real, received.real)
            and _is_close(expected.imag, received.imag)
        )
    return expected == received


def _is_close(expected: float, received: float) -> bool:
    if expected == received:
        return True
    try:
        number = float(received)
    except OverflowError:
        return False
    if math.isnan(expected):
        return math.isnan(number)
    if expected == 0.0:
        return abs(number) <= TOLERANCE_AT_ZERO
    return math.isclose(expected, number, rel_tol=RELATIVE_TOLERANCE)


def _read_payload(received: Encoded, *tags: str) -> list[Any] | None:
    if isinstance(received, Tagged) and received.tag in tags:
        if type(received.payload) is not list:
            raise ValueError(f"a {received.tag} holds a list")
        return received.payload
    return None


def _all_match(expected: Sequence[object], received: Sequence[Encoded]) -> bool:
    return len(expected) == len(received) and all(map(matches, expected, received))


def _dict_matches(expected: Mapping[object, object], received: Sequence[Encoded]) -> bool:
    if len(expected) != len(received):
        return False
    remaining = set(expected)
    for key, value in received:
        name = _find_element(remaining, key)
        if name is _MISSING or not matches(expected[name], value):
            return False
        remaining.remove(name)
    return True


def _find_element(remaining: set[object], item: Encoded) -> object:
    if _is_hashable(item):
        element = decode(item)
        if element in remaining:
            return element
    # NOTE: the only part whose work is not linear in the length of what was received.
    if time.thread_time() > getattr(_comparison, "end", math.inf):
        raise Overload
    # NOTE: floats within their tolerance, and frozensets without building them.
    return next((element for element in remaining if matches(element, item)), _MISSING)


def _is_scalar(received: Encoded) -> bool:
    if isinstance(received, Tagged):
        return received.tag in _SCALAR_TAGS
    return type(received) is not list


def _is_hashable(received: Encoded) -> bool:
    """Return whether this is a scalar or tuples of scalars, which are hashed without a table."""
    if isinstance(received, Tagged) and received.tag == "tuple":
        return all(map(_is_hashable, received.payload))
    return _is_scalar(received)


def is_same_output(expected: bytes, printed: bytes, tolerance: float, rule: str = "exact") -> bool:
    """Return whether printed output is the expected one by a rule; see above.

    The tolerance of the exact rule is the largest absolute or relative error of a finite decimal
    number; 0 compares text. `nan` and `inf` are text.
    """
    expected, printed = expected.rstrip(), printed.rstrip()
    if rule != "exact":
        expected, printed = expected.lstrip(), printed.lstrip()
    if expected == printed:
        return True
    if rule == "code_contests":
        return _is_same_line(expected.lower(), printed.lower(), tolerance, rule)
    lines, others = expected.split(b"\n"), printed.split(b"\n")
    if rule == "apps":
        lines, others = ([line for line in each if line.strip()] for each in (lines, others))
    return len(lines) == len(others) and all(
        _is_same_line(*pair, tolerance, rule) for pair in zip(lines, others, strict=True)
    )


def _is_same_line(expected: bytes, printed: bytes, tolerance: float, rule: str) -> bool:
    tokens, received = expected.split(), printed.split()
    return len(tokens) == len(received) and all(
        _is_same_token(*pair, tolerance, rule) for pair in zip(tokens, received, strict=True)
    )


def _is_same_token(expected: bytes, printed: bytes, tolerance: float, rule: str) -> bool:
    if expected == printed:
        return True
    if rule == "exact" and not tolerance:
        return False
    number, received = _read_number(expected), _read_number(printed)
    if number is None or received is None:
        return False
    error = abs(number - received)
    if rule == "exact":
        return error <= tolerance * max(1.0, abs(number))
    if all(word.lstrip(b"+-").isdigit() for word in (expected, printed)):
        return int(expected) == int(printed)
    return error < 1e-5 if rule == "code_contests" else error <= 1e-8 + 1e-5 * abs(number)


def _read_number(token: bytes) -> float | None:
    if len(token) > _LONGEST_NUMBER or not _NUMBER.fullmatch(token):
        return None
    number = float(token)
    return number if math.isfinite(number) else None
