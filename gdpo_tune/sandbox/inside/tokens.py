"""Whether a program printed what a test expects, line by line and token by token.

Both sides stay bytes: what a candidate prints need not be text. The work grows linearly with
the length of both, whatever is in them.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LONGEST_NUMBER = 400
"""Digits of the largest finite float and some more; a longer token is compared as text."""


def same_output(expected: bytes, printed: bytes, tolerance: float) -> bool:
    """Compare what was printed with what should have been.

    Args:
        expected: trusted.
        printed: whatever the candidate sent.
        tolerance: largest absolute or relative error of a finite decimal number; 0 compares
            text. `nan` and `inf` are text.
    """
    expected, printed = expected.rstrip(), printed.rstrip()
    if expected == printed:
        return True
    if expected.count(b"\n") != printed.count(b"\n"):
        return False
    lines = zip(expected.split(b"\n"), printed.split(b"\n"), strict=True)
    return all(_same_line(line, received, tolerance) for line, received in lines)


def _same_line(expected: bytes, printed: bytes, tolerance: float) -> bool:
    tokens, received = expected.split(), printed.split()
    if tokens == received:
        return True
    if not tolerance or len(tokens) != len(received):
        return False
    return all(_close(*pair, tolerance) for pair in zip(tokens, received, strict=True))


def _close(expected: bytes, printed: bytes, tolerance: float) -> bool:
    if expected == printed:
        return True
    wanted, number = _read_number(expected), _read_number(printed)
    if wanted is None or number is None:
        return False
    return abs(wanted - number) <= tolerance * max(1.0, abs(wanted))


def _read_number(token: bytes) -> float | None:
    if len(token) > _LONGEST_NUMBER or not _NUMBER.fullmatch(token):
        return None
    number = float(token)
    return number if math.isfinite(number) else None
