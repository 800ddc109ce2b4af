"""Reader of `assert` tests: those that compare a call with a literal need no checker."""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import lru_cache

from .inside.encoding import encode
from .jobs import Call


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
