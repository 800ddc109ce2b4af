"""Whether a candidate's result is what a test expects: Python's `==` between built-in values.

Two deviations, both towards what a test means. A float is compared within a relative 1e-9,
or an absolute 1e-12 where exactly 0.0 is expected; and an expected NaN is met by NaN.

The comparison follows the expected value, which is trusted: it never builds a container from
the received one, and never looks at more of it than the expected value has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .encoding import Encoded, Tagged, decode, decode_parts

RELATIVE_TOLERANCE = 1e-9
TOLERANCE_AT_ZERO = 1e-12
_SCALAR_TAGS = frozenset(
    ("int", "float", "bytes", "complex", "decimal", "datetime", "date", "timedelta")
)


def matches(expected: object, received: Encoded) -> bool:
    """Compare an expected value with an encoded one, as `encoding.parse` returns it.

    Raises:
        ValueError, TypeError, ArithmeticError: `received` is not an encoded value.
    """
    if isinstance(expected, list):
        return type(received) is list and _all_match(expected, received)
    if isinstance(expected, (set, frozenset)):
        payload = _payload(received, "set", "frozenset")
        return payload is not None and _set_matches(expected, payload)
    if isinstance(expected, tuple):
        payload = _payload(received, "tuple")
        return payload is not None and _all_match(expected, payload)
    if isinstance(expected, dict):
        payload = _payload(received, "dict")
        return payload is not None and _dict_matches(expected, payload)
    if isinstance(received, Tagged) and received.tag == "fraction":
        return _fraction_matches(expected, *decode_parts(received.payload))
    return _is_scalar(received) and same_scalar(expected, decode(received))


def same_scalar(expected: object, received: object) -> bool:
    """Compare two values that hold no others."""
    if isinstance(received, int) and not isinstance(expected, int) and _is_long(received):
        return False
    if isinstance(expected, float):
        return isinstance(received, (bool, int, float)) and _close(expected, received)
    if isinstance(expected, complex):
        return (
            isinstance(received, (bool, int, float, complex))
            and _close(expected.real, received.real)
            and _close(expected.imag, received.imag)
        )
    return expected == received


def _is_long(number: int) -> bool:
    # NOTE: a decimal or a float of this size takes quadratic time to make, or does not exist.
    return number.bit_length() > 1 << 16


def _fraction_matches(expected: object, numerator: int, denominator: int) -> bool:
    # NOTE: reducing a foreign fraction takes quadratic time, so it is not built.
    if isinstance(expected, (int, Fraction)):
        return (expected.numerator, expected.denominator) == (numerator, denominator)
    return isinstance(expected, float) and _close(expected, numerator / denominator)


def _close(expected: float, received: float) -> bool:
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


def _payload(received: Encoded, *tags: str) -> list[Any] | None:
    if isinstance(received, Tagged) and received.tag in tags:
        if type(received.payload) is not list:
            raise ValueError(f"a {received.tag} holds a list")
        return received.payload
    return None


def _all_match(expected: Sequence[object], received: Sequence[Encoded]) -> bool:
    return len(expected) == len(received) and all(map(matches, expected, received))


def _set_matches(expected: set[object] | frozenset[object], received: Sequence[Encoded]) -> bool:
    if len(expected) != len(received):
        return False
    remaining = set(expected)
    for item in received:
        element = _find(remaining, item)
        if element is _MISSING:
            return False
        remaining.remove(element)
    return True


def _dict_matches(expected: dict[object, object], received: Sequence[Encoded]) -> bool:
    if len(expected) != len(received):
        return False
    remaining = set(expected)
    for key, value in received:
        name = _find(remaining, key)
        if name is _MISSING or not matches(expected[name], value):
            return False
        remaining.remove(name)
    return True


_MISSING = object()


def _find(remaining: set[object], item: Encoded) -> object:
    """The expected element that `item` equals, or `_MISSING`."""
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
    """Whether it is a scalar, or tuples of scalars: what can be hashed without a table."""
    if isinstance(received, Tagged) and received.tag == "tuple":
        return all(map(_is_hashable, received.payload))
    return _is_scalar(received)
