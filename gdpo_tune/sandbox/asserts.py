"""Tests as they are sent; an `assert` that compares a call with a literal is sent as the call."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from .inside.encoding import Encoded, encode
from .jobs import Call, name_in_errors


def encode_tests(tests: Iterable[Call | str]) -> list[list[Encoded]]:
    """Encode each test as `["call", function, arguments, expected]` or `["assert", source]`.

    Raises:
        ValueError: a test is not Python, has neither `assert` nor `raise`, or holds a value
            nested too deeply.
        TypeError: a call holds a value that cannot be sent.
    """
    encoded: list[list[Encoded]] = []
    for number, test in enumerate(tests):
        with name_in_errors(f"test {number}"):
            call = read_assert(test) if isinstance(test, str) else test
            if call is None:
                encoded.append(["assert", test])
                continue
            arguments: Encoded = [encode(argument, strict=True) for argument in call.args]
            encoded.append(["call", call.function, arguments, encode(call.expected, strict=True)])
    return encoded


@lru_cache(maxsize=4096)
def read_assert(source: str) -> Call | None:
    """Turn `assert f(literals) == literal` into a call; return None for any other test.

    Raises:
        ValueError: the source is not Python, or nothing in it can fail.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test is not Python: {source!r}: {error}") from error
    if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
        raise ValueError(f"nothing in this test can fail: {source!r}")
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            return _build_call(left, right) or _build_call(right, left)
        case _:
            return None


def _build_call(call: ast.expr, expected: ast.expr) -> Call | None:
    match call:
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
            with suppress(ValueError, TypeError, MemoryError, RecursionError):
                values = tuple(ast.literal_eval(argument) for argument in arguments)
                literal = ast.literal_eval(expected)
                encode([values, literal], strict=True)
                return Call(function, values, literal)
        case _:
            pass
    return None
