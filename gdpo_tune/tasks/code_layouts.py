"""Layouts of data sets for `code`; see `layouts`."""

from __future__ import annotations

import ast
from typing import Any

from gdpo_tune.core.task_info import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data_rows import (
    Row,
    RowError,
    get_optional_text,
    get_text,
    get_texts,
    parse_json,
    require_list,
    require_mapping,
)
from gdpo_tune.tasks.execution import (
    STREAMS_NOTE,
    build_code_problem,
    check_assert,
    check_streams,
)

# APPS: `question`, and `input_output`, JSON with `inputs`, `outputs` and perhaps `fn_name`.
#
# With a function name, each input is a list of arguments. An output may be right as it stands or as
# the only item of a list: the released judge accepts both, and so does this layout; a tuple counts as
# a list. `starter_code` is shown; where it begins `class Solution`, the method is called. Without a
# name, the program reads its input and prints. `solutions` and `url` are not used.
#
# Source: arXiv 2105.09938; columns of `codeparrot/apps` and `test_one_solution` of its judge.

_APPS_TESTS = "input_output"
_TYPES = "from typing import Any, Dict, List, Optional, Set, Tuple"
"""Starter code comes from a site that imports these beforehand."""


def convert_apps(row: Row) -> Problem:
    """Return the question with its starter code, and its tests; the family is the difficulty."""
    question = get_text(row, "question").strip()
    starter = get_optional_text(row, "starter_code").strip()
    family = get_optional_text(row, "difficulty") or "apps"
    tests = require_mapping(parse_json(get_text(row, _APPS_TESTS), _APPS_TESTS), _APPS_TESTS)
    inputs, outputs = (require_list(tests.get(key), _APPS_TESTS) for key in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise RowError(_APPS_TESTS, f"{len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    request = f"{question}\n{starter}\n" if starter else f"{question}\n"
    if not function:
        texts = [[_join_lines(value) for value in values] for values in (inputs, outputs)]
        pairs = check_streams(texts[0], texts[1], _APPS_TESTS)
        return build_code_problem(request + STREAMS_NOTE, family, streams=pairs)
    if not isinstance(function, str) or not function.isidentifier():
        raise RowError(_APPS_TESTS, f"fn_name is {function!r}, which is not a function name")
    is_method = "class Solution" in starter
    if not starter:
        request += f"Write a function {function}.\n"
    asserts = [
        check_assert(
            _write_assert(function, require_list(arguments, _APPS_TESTS), expected), _APPS_TESTS
        )
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
    return (
        value if isinstance(value, str) else "\n".join(map(str, require_list(value, _APPS_TESTS)))
    )


def _write_assert(function: str, arguments: list[Any], expected: object) -> str:
    call = f"{function}({', '.join(map(repr, arguments))})"
    if not isinstance(expected, list):
        return f"assert {call} == {expected!r}"
    right = f"({expected!r}, {expected[0]!r})" if expected else "([],)"
    return f"r = {call}\nassert (list(r) if isinstance(r, tuple) else r) in {right}"


APPS = LayoutInfo(
    convert_apps,
    tasks=("code",),
    columns=("question", "input_output"),
    optional=("difficulty", "starter_code"),
    doc="APPS: functions with arguments and results, or programs that read and print",
)


# CodeContests: `description`, and `public_tests`, `private_tests`, `generated_tests`.
#
# Each of the three is a mapping of `input` and `output`, lists of texts. Public tests come first, as
# `code_tests.MOST_TESTS` are kept. Problems that read a file instead of standard input, or show a
# picture (`<image>`), cannot be solved here and are left out.
#
# Source: Science 378 (2022), AlphaCode; columns of `deepmind/code_contests`.

_CONTEST_TESTS = ("public_tests", "private_tests", "generated_tests")


def convert_code_contests(row: Row) -> Problem:
    """Return the description and its tests."""
    request = get_text(row, "description").strip()
    if "<image>" in request:
        raise RowError("description", "it shows a picture")
    if get_optional_text(row, "input_file"):
        raise RowError("input_file", "the program would read a file")
    pairs: list[tuple[str, str]] = []
    for column in _CONTEST_TESTS:
        tests = require_mapping(row.get(column) or {"input": [], "output": []}, column)
        pairs += check_streams(get_texts(tests, "input"), get_texts(tests, "output"), column)
    if not pairs:
        raise RowError(_CONTEST_TESTS[0], "no test")
    return build_code_problem(f"{request}\n{STREAMS_NOTE}", "code_contests", streams=pairs)


CODE_CONTESTS = LayoutInfo(
    convert_code_contests,
    tasks=("code",),
    columns=("description", "public_tests"),
    optional=("private_tests", "generated_tests", "input_file"),
    doc="CodeContests: programs that read and print",
)


# HumanEval: `prompt` is the head of a function, `test` defines `check(candidate)`.
#
# The prompt stands above the policy's program, so its imports and helpers are there even if the
# program does not repeat them. The function that the program defines replaces the empty one. The
# asserts of `check` are one test.
#
# Source: arXiv 2107.03374; columns of `openai/openai_humaneval`.


def convert_humaneval(row: Row) -> Problem:
    """Return the function to complete, and its check."""
    prompt, function, test = (get_text(row, name) for name in ("prompt", "entry_point", "test"))
    if not function.isidentifier() or f"def {function}(" not in prompt:
        raise RowError("entry_point", f"{function!r} is no function that the prompt begins")
    if "def check(" not in test:
        raise RowError("test", "does not define check(candidate)")
    check = check_assert(f"{test}\ncheck({function})", "test")
    request = f"Complete this function.\n{prompt.rstrip()}\n"
    return build_code_problem(request, "humaneval", function=function, head=prompt, asserts=[check])


HUMANEVAL = LayoutInfo(
    convert_humaneval,
    tasks=("code",),
    columns=("prompt", "entry_point", "test"),
    doc="HumanEval: the head of a function, and `check(candidate)`",
)


# MBPP: `text` asks for a function, `code` is a solution, `test_list` has asserts.
#
# The first test is shown, because the function's name and arguments are nowhere else; all are run.
# `test_setup_code` and, in the sanitized edition, `test_imports` are run before each test, apart from
# the policy's program. A setup that needs something that only the solution defines, such as a class,
# cannot be run there, so such a row is left out.
#
# Source: arXiv 2108.07732; columns of `google-research-datasets/mbpp`, both configurations.


def convert_mbpp(row: Row) -> Problem:
    """Return the problem of a row of the full edition."""
    return _convert_mbpp(row, "text", get_optional_text(row, "test_setup_code"), "test_setup_code")


def convert_mbpp_sanitized(row: Row) -> Problem:
    """Return the problem of a row of the sanitized edition, with the text in `prompt`."""
    return _convert_mbpp(row, "prompt", "\n".join(get_texts(row, "test_imports")), "test_imports")


def _convert_mbpp(row: Row, column: str, setup: str, setup_column: str) -> Problem:
    tests = [check_assert(test, "test_list") for test in get_texts(row, "test_list")]
    if not tests:
        raise RowError("test_list", "no test")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    solution = _parse(get_text(row, "code"), "code")
    definitions = {node.name for node in solution.body if isinstance(node, kinds)}
    function = _find_tested_function(tests[0], definitions)
    nodes = ast.walk(_parse(setup, setup_column))
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & definitions
    if used:
        raise RowError(setup_column, f"needs {min(used)} of the solution, which tests cannot reach")
    example = f"The function must pass this test:\n{tests[0].strip()}\n"
    request = f"{get_text(row, column).strip()}\n{example}"
    setup = f"{setup.strip()}\n" if setup.strip() else ""
    asserts = [check_assert(setup + test, setup_column) for test in tests]
    return build_code_problem(request, "mbpp", function=function, asserts=asserts)


def _find_tested_function(test: str, definitions: set[str]) -> str:
    """Return the function of the solution that a test calls."""
    calls = (node for node in ast.walk(_parse(test, "test_list")) if isinstance(node, ast.Call))
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in definitions:
            return call.func.id
    raise RowError("test_list", f"the first test calls nothing that the code defines: {test!r}")


def _parse(source: str, column: str) -> ast.Module:
    try:
        return ast.parse(source.replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowError(column, f"not Python: {error}") from error


MBPP = LayoutInfo(
    convert_mbpp,
    tasks=("code",),
    columns=("text", "code", "test_list"),
    optional=("test_setup_code",),
    doc="MBPP, full edition: a text and asserts, of which the first is shown",
)
MBPP_SANITIZED = LayoutInfo(
    convert_mbpp_sanitized,
    tasks=("code",),
    columns=("prompt", "code", "test_list", "test_imports"),
    doc="MBPP, sanitized edition",
)
