"""HumanEval: `prompt` is the head of a function, `test` defines `check(candidate)`.

The prompt stands above the policy's program, so that its imports and helpers are there whether or
not they are repeated; the function that the program defines takes the place of the empty one. The
asserts of `check` are one test.

Source: arXiv 2107.03374; columns of `openai/openai_humaneval`.
"""

from __future__ import annotations

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import checked_assert, code_problem
from gdpo_tune.tasks.data.columns import Row, RowError, text


def problem(row: Row) -> Problem:
    """The function to complete, and its check.

    Raises:
        RowError: a column is not of its kind, or the test cannot be run.
    """
    prompt, function, test = (text(row, name) for name in ("prompt", "entry_point", "test"))
    if not function.isidentifier() or f"def {function}(" not in prompt:
        raise RowError("entry_point", f"{function!r} is no function that the prompt begins")
    if "def check(" not in test:
        raise RowError("test", "does not define check(candidate)")
    check = checked_assert(f"{test}\ncheck({function})", "test")
    request = f"Complete this function.\n{prompt.rstrip()}\n"
    return code_problem(request, "humaneval", function=function, head=prompt, asserts=[check])
