r"""MATH: `problem`, and `solution` whose last `\boxed{...}` is the answer.

A column `answer` is taken instead where it is there, as in MATH-500. Answers are LaTeX; `level` and
`type` are not used.

Source: arXiv 2103.03874; columns of the released data and of its copies on the Hub.
"""

from __future__ import annotations

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import Row, RowError, optional_text, text

_BOXES = (r"\boxed", r"\fbox")


def problem(row: Row) -> Problem:
    """The problem, and the answer as `data["answer"]`.

    Raises:
        RowError: a column is missing or empty, or the solution boxes nothing.
    """
    answer = optional_text(row, "answer").strip() or last_boxed(text(row, "solution"))
    if not answer:
        raise RowError("solution", r"no answer in \boxed{...}")
    return Problem(text(row, "problem").strip() + "\n", "math", {"answer": answer})


def last_boxed(solution: str) -> str:
    r"""What the last `\boxed{...}` holds, braces inside of it included; empty if there is none.

    `\boxed 7` holds the one character.
    """
    start, name = max((solution.rfind(box), box) for box in _BOXES)
    if start < 0:
        return ""
    rest = solution[start + len(name) :].lstrip()
    if not rest.startswith("{"):
        return rest[:1]
    depth = 0
    for index, character in enumerate(rest):
        escaped = index > 0 and rest[index - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:index].strip()
    return ""
