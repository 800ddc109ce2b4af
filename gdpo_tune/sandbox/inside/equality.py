"""Comparison of results with what tests expect: returned values, and printed output.

Values are compared by Python's `==` between built-in values, with two deviations. An expected
float allows a relative error of 1e-9, or an absolute one of 1e-12 where it is exactly 0.0; and an
expected NaN equals NaN. The comparison follows the expected value, which is trusted: it never
builds a container from the received one, and never reads more of it than the expected value has.

Printed output is compared line by line and token by token, as bytes, because a candidate need not
print text. The work grows linearly with the length of both sides, whatever they hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from .encoding import Encoded, Tagged, decode, decode_parts

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
    """Return whether an encoded value, as `encoding.parse` reads it, is the expected one.

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
        return _fraction_matches(expected, *decode_parts(received.payload))
    return _is_scalar(received) and scalar_matches(expected, decode(received))


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


def _fraction_matches(expected: object, numerator: int, denominator: int) -> bool:
    # NOTE: reducing a foreign fraction takes quadratic time, so it is not built.
    if isinstance(expected, (int, Fraction)):
        return (expected.numerator, expected.denominator) == (numerator, denominator)
    return isinstance(expected, float) and _is_close(expected, numerator / denominator)


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
    """Return the expected element that equals `item`, or `_MISSING`."""
    if _is_hashable(item):
        element = decode(item)
        if element in remaining:
            return element
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


def is_same_output(expected: bytes, printed: bytes, tolerance: float) -> bool:
    """Return whether printed output is the expected one.

    The tolerance is the largest absolute or relative error of a finite decimal number; 0 compares
    text. `nan` and `inf` are text.
    """
    expected, printed = expected.rstrip(), printed.rstrip()
    if expected == printed:
        return True
    if expected.count(b"\n") != printed.count(b"\n"):
        return False
    lines = zip(expected.split(b"\n"), printed.split(b"\n"), strict=True)
    return all(_is_same_line(line, received, tolerance) for line, received in lines)


def _is_same_line(expected: bytes, printed: bytes, tolerance: float) -> bool:
    tokens, received = expected.split(), printed.split()
    if tokens == received:
        return True
    if not tolerance or len(tokens) != len(received):
        return False
    return all(_is_same_token(*pair, tolerance) for pair in zip(tokens, received, strict=True))


def _is_same_token(expected: bytes, printed: bytes, tolerance: float) -> bool:
    if expected == printed:
        return True
    number, received = _read_number(expected), _read_number(printed)
    if number is None or received is None:
        return False
    return abs(number - received) <= tolerance * max(1.0, abs(number))


def _read_number(token: bytes) -> float | None:
    if len(token) > _LONGEST_NUMBER or not _NUMBER.fullmatch(token):
        return None
    number = float(token)
    return number if math.isfinite(number) else None
