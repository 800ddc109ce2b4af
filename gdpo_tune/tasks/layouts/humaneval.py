"""HumanEval: `prompt` is the head of a function, `test` defines `check(candidate)`.

The prompt stands above the policy's program, so its imports and helpers are there even if the
program does not repeat them. The function that the program defines replaces the empty one. The
asserts of `check` are one test.

Source: arXiv 2107.03374; columns of `openai/openai_humaneval`.
"""

from __future__ import annotations

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import build_code_problem, check_assert
from gdpo_tune.tasks.data.columns import Row, RowError, get_text


def convert(row: Row) -> Problem:
    """Return the function to complete, and its check."""
    prompt, function, test = (get_text(row, name) for name in ("prompt", "entry_point", "test"))
    if not function.isidentifier() or f"def {function}(" not in prompt:
        raise RowError("entry_point", f"{function!r} is no function that the prompt begins")
    if "def check(" not in test:
        raise RowError("test", "does not define check(candidate)")
    check = check_assert(f"{test}\ncheck({function})", "test")
    request = f"Complete this function.\n{prompt.rstrip()}\n"
    return build_code_problem(request, "humaneval", function=function, head=prompt, asserts=[check])


LAYOUT = LayoutInfo(
    convert,
    tasks=("code",),
    columns=("prompt", "entry_point", "test"),
    doc="HumanEval: the head of a function, and `check(candidate)`",
)
