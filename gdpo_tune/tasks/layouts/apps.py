"""APPS: `question`, and `input_output`, JSON with `inputs`, `outputs` and perhaps `fn_name`.

With a function name, each input is a list of arguments. An output may be right as it stands or as
the only item of a list: the released judge accepts both, and so does this layout; a tuple counts as
a list. `starter_code` is shown; where it begins `class Solution`, the method is called. Without a
name, the program reads its input and prints. `solutions` and `url` are not used.

Source: arXiv 2105.09938; columns of `codeparrot/apps` and `test_one_solution` of its judge.
"""

from __future__ import annotations

from typing import Any

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import STREAMS_NOTE, build_code_problem, check_assert, check_streams
from gdpo_tune.tasks.data.columns import (
    Row,
    RowError,
    get_optional_text,
    get_text,
    parse_json,
    require_list,
    require_mapping,
)

_TESTS = "input_output"
_TYPES = "from typing import Any, Dict, List, Optional, Set, Tuple"
"""Starter code comes from a site that imports these beforehand."""


def convert(row: Row) -> Problem:
    """Return the question with its starter code, and its tests; the family is the difficulty."""
    question = get_text(row, "question").strip()
    starter = get_optional_text(row, "starter_code").strip()
    family = get_optional_text(row, "difficulty") or "apps"
    tests = require_mapping(parse_json(get_text(row, _TESTS), _TESTS), _TESTS)
    inputs, outputs = (require_list(tests.get(key), _TESTS) for key in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise RowError(_TESTS, f"{len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    request = f"{question}\n{starter}\n" if starter else f"{question}\n"
    if not function:
        texts = [[_join_lines(value) for value in values] for values in (inputs, outputs)]
        pairs = check_streams(texts[0], texts[1], _TESTS)
        return build_code_problem(request + STREAMS_NOTE, family, streams=pairs)
    if not isinstance(function, str) or not function.isidentifier():
        raise RowError(_TESTS, f"fn_name is {function!r}, which is not a function name")
    is_method = "class Solution" in starter
    if not starter:
        request += f"Write a function {function}.\n"
    asserts = [
        check_assert(_write_assert(function, require_list(arguments, _TESTS), expected), _TESTS)
        for arguments, expected in zip(inputs, outputs, strict=True)
    ]
    return build_code_problem(
        request,
        family,
        function=function,
        head=_TYPES if is_method else "",
        tail=f"{function} = Solution().{function}" if is_method else "",
        asserts=asserts,
    )


def _join_lines(value: object) -> str:
    """Return a text as it is, and a list of lines as one text."""
    return value if isinstance(value, str) else "\n".join(map(str, require_list(value, _TESTS)))


def _write_assert(function: str, arguments: list[Any], expected: object) -> str:
    call = f"{function}({', '.join(map(repr, arguments))})"
    if not isinstance(expected, list):
        return f"assert {call} == {expected!r}"
    right = f"({expected!r}, {expected[0]!r})" if expected else "([],)"
    return f"r = {call}\nassert (list(r) if isinstance(r, tuple) else r) in {right}"


LAYOUT = LayoutInfo(
    convert,
    tasks=("code",),
    columns=("question", "input_output"),
    optional=("difficulty", "starter_code"),
    doc="APPS: functions with arguments and results, or programs that read and print",
)
