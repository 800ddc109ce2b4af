"""GSM8K: `question`, and `answer` that ends with `#### ` and a number.

The number is written plainly (`1,000`, `$18` and `18.0` become `1000`, `18`, `18`). Otherwise the
rewards for a correct and for a whole answer would contradict each other. The steps before it are
not used.

Source: arXiv 2110.14168; columns of `openai/gsm8k`.
"""

from __future__ import annotations

import re

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.answers import normalize_number
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import Row, RowError, get_text

_PLAIN = re.compile(r"-?\d+(?:\.\d+)?", flags=re.ASCII)


def convert(row: Row) -> Problem:
    """Return the question, and the number as `data["answer"]`, also as it is written."""
    _, mark, last = get_text(row, "answer").rpartition("####")
    if not mark:
        raise RowError("answer", "no '####' with the result after it")
    # Some exporters put a blank after the sign or between groups of digits.
    answer = normalize_number(re.sub(r"(?<=[-+\d,$])\s+(?=[\d$])", "", last))
    if not _PLAIN.fullmatch(answer):
        raise RowError("answer", f"{last.strip()!r} after '####' is not a number")
    data = {"answer": answer, "written_answer": last.strip()}
    return Problem(get_text(row, "question").strip() + "\n", "gsm8k", data)


LAYOUT = LayoutInfo(
    convert,
    tasks=("math", "gsm8k"),
    columns=("question", "answer"),
    doc="word problems; the number after `####` is the answer",
)
