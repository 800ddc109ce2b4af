"""APPS: `question`, and `input_output`, JSON with `inputs`, `outputs` and perhaps `fn_name`.

With a function name, each input is a list of arguments, and an output may be right as it stands or
as the only item of a list, which the released judge accepts both, and so do we; a tuple counts as a
list. `starter_code` is shown; where it begins `class Solution`, the method is called. Without a
name, the program reads its input and prints. `solutions` and `url` are not used.

Source: arXiv 2105.09938; columns of `codeparrot/apps` and `test_one_solution` of its judge.
"""

from __future__ import annotations

from typing import Any

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import checked_assert, checked_stream, code_problem
from gdpo_tune.tasks.data.columns import (
    Row,
    RowError,
    from_json,
    mapping,
    optional_text,
    sequence,
    text,
)

_TESTS = "input_output"
_TYPES = "from typing import Any, Dict, List, Optional, Set, Tuple"
"""Starter code is written as on a site that imports these beforehand."""
_STREAMS_NOTE = "Read the input from standard input and print the answer.\n"


def problem(row: Row) -> Problem:
    """The question with its starter code, and its tests; the family is the difficulty.

    Raises:
        RowError: a column is not of its kind, or there is no test.
    """
    question, starter = text(row, "question").strip(), optional_text(row, "starter_code").strip()
    family = optional_text(row, "difficulty") or "apps"
    tests = mapping(from_json(text(row, _TESTS), _TESTS), _TESTS)
    inputs, outputs = (sequence(tests.get(key), _TESTS) for key in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise RowError(_TESTS, f"{len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    request = f"{question}\n{starter}\n" if starter else f"{question}\n"
    if not function:
        pairs = [
            checked_stream(_lines(given), _lines(wanted), _TESTS)
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
        return code_problem(request + _STREAMS_NOTE, family, streams=pairs)
    if not isinstance(function, str) or not function.isidentifier():
        raise RowError(_TESTS, f"fn_name is {function!r}, no name of a function")
    method = "class Solution" in starter
    if not starter:
        request += f"Write a function {function}.\n"
    asserts = [
        checked_assert(_assert(function, sequence(given, _TESTS), wanted), _TESTS)
        for given, wanted in zip(inputs, outputs, strict=True)
    ]
    return code_problem(
        request,
        family,
        function=function,
        head=_TYPES if method else "",
        tail=f"{function} = Solution().{function}" if method else "",
        asserts=asserts,
    )


def _lines(value: object) -> str:
    """A text as it is; a list of lines as one text."""
    return value if isinstance(value, str) else "\n".join(map(str, sequence(value, _TESTS)))


def _assert(function: str, arguments: list[Any], wanted: object) -> str:
    call = f"{function}({', '.join(map(repr, arguments))})"
    if not isinstance(wanted, list):
        return f"assert {call} == {wanted!r}"
    right = f"({wanted!r}, {wanted[0]!r})" if wanted else "([],)"
    return f"r = {call}\nassert (list(r) if isinstance(r, tuple) else r) in {right}"
