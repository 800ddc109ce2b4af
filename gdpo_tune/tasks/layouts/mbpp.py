"""MBPP: `text` asks for a function, `code` is a solution, `test_list` has asserts.

The first test is shown, because the function's name and arguments are nowhere else; all are run.
`test_setup_code` and, in the sanitized edition, `test_imports` are run before each test, apart from
the policy's program. A setup that needs something that only the solution defines, such as a class,
cannot be run there, so such a row is left out.

Source: arXiv 2108.07732; columns of `google-research-datasets/mbpp`, both configurations.
"""

from __future__ import annotations

import ast

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import build_code_problem, check_assert
from gdpo_tune.tasks.data.columns import Row, RowError, get_optional_text, get_text, get_texts


def convert_full(row: Row) -> Problem:
    """Return the problem of a row of the full edition."""
    return _convert(row, "text", get_optional_text(row, "test_setup_code"), "test_setup_code")


def convert_sanitized(row: Row) -> Problem:
    """Return the problem of a row of the sanitized edition, with the text in `prompt`."""
    return _convert(row, "prompt", "\n".join(get_texts(row, "test_imports")), "test_imports")


def _convert(row: Row, column: str, setup: str, setup_column: str) -> Problem:
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


LAYOUT = LayoutInfo(
    convert_full,
    tasks=("code",),
    columns=("text", "code", "test_list"),
    optional=("test_setup_code",),
    doc="MBPP, full edition: a text and asserts, of which the first is shown",
)
SANITIZED_LAYOUT = LayoutInfo(
    convert_sanitized,
    tasks=("code",),
    columns=("prompt", "code", "test_list", "test_imports"),
    doc="MBPP, sanitized edition",
)
