"""MBPP: `text` asks for a function, `code` is a solution, `test_list` has asserts.

The first test is shown, because the function's name and arguments are nowhere else; all are run.
`test_setup_code` and, in the sanitized edition, `test_imports` are run before each test, apart from
the policy's program. A setup that needs what only the solution defines, such as a class, cannot be
run there, so such a row is left out.

Source: arXiv 2108.07732; columns of `google-research-datasets/mbpp`, both configurations.
"""

from __future__ import annotations

import ast

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import checked_assert, code_problem
from gdpo_tune.tasks.data.columns import Row, RowError, optional_text, text, texts


def problem(row: Row) -> Problem:
    """A row of the full edition.

    Raises:
        RowError: a column is not of its kind, or there is no test that can be run.
    """
    return _problem(row, "text", optional_text(row, "test_setup_code"), "test_setup_code")


def sanitized(row: Row) -> Problem:
    """A row of the sanitized edition, which calls the text `prompt` and lists imports.

    Raises:
        RowError: a column is not of its kind, or there is no test that can be run.
    """
    return _problem(row, "prompt", "\n".join(texts(row, "test_imports")), "test_imports")


def _problem(row: Row, column: str, setup: str, setup_column: str) -> Problem:
    tests = [checked_assert(test, "test_list") for test in texts(row, "test_list")]
    if not tests:
        raise RowError("test_list", "no test")
    defined = _defined(text(row, "code"))
    function = _tested(tests[0], defined)
    _refuse_foreign(setup, setup_column, defined)
    shown = f"The function must pass this test:\n{tests[0].strip()}\n"
    request = f"{text(row, column).strip()}\n{shown}"
    setup = f"{setup.strip()}\n" if setup.strip() else ""
    asserts = [checked_assert(setup + test, setup_column) for test in tests]
    return code_problem(request, "mbpp", function=function, asserts=asserts)


def _defined(code: str) -> set[str]:
    """Functions and classes at the top of a solution."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in _parse(code, "code").body if isinstance(node, kinds)}


def _tested(test: str, defined: set[str]) -> str:
    """The function of the solution that a test calls."""
    calls = (node for node in ast.walk(_parse(test, "test_list")) if isinstance(node, ast.Call))
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in defined:
            return call.func.id
    raise RowError("test_list", f"the first test calls nothing that the code defines: {test!r}")


def _refuse_foreign(setup: str, column: str, defined: set[str]) -> None:
    tree = _parse(setup, column)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & defined
    if used:
        raise RowError(column, f"needs {min(used)} of the solution, which tests cannot reach")


def _parse(source: str, column: str) -> ast.Module:
    try:
        return ast.parse(source.replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowError(column, f"not Python: {error}") from error
