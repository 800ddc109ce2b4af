r"""MATH: `problem`, and `solution` whose last `\boxed{...}` is the answer.

A column `answer`, as in MATH-500, is used instead if it is there. Answers are LaTeX; `level` and
`type` are not used.

Source: arXiv 2103.03874; columns of the released data and of its copies on the Hub.
"""

from __future__ import annotations

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import Row, RowError, get_optional_text, get_text

_BOXES = (r"\boxed", r"\fbox")


def convert(row: Row) -> Problem:
    """Return the problem, and the answer as `data["answer"]`."""
    answer = get_optional_text(row, "answer").strip() or extract_box(get_text(row, "solution"))
    if not answer:
        raise RowError("solution", r"no answer in \boxed{...}")
    return Problem(get_text(row, "problem").strip() + "\n", "math", {"answer": answer})


def extract_box(solution: str) -> str:
    r"""Return the content of the last `\boxed{...}`, inner braces included; empty without one.

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


LAYOUT = LayoutInfo(
    convert,
    tasks=("math", "gsm8k"),
    columns=("problem", "solution"),
    optional=("answer",),
    doc="MATH: the last `\\boxed{}` of the solution is the answer, or the column `answer`",
)
