"""GSM8K: `question`, and `answer` that ends with `#### ` and a number.

The number is written plainly (`1,000`, `$18` and `18.0` become `1000`, `18`, `18`), since otherwise
the rewards for a correct and for a whole answer would contradict each other. The steps before it
are not used.

Source: arXiv 2110.14168; columns of `openai/gsm8k`.
"""

from __future__ import annotations

import re

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import Row, RowError, text
from gdpo_tune.tasks.math_rewards import plain_number

_PLAIN = re.compile(r"-?\d+(?:\.\d+)?", flags=re.ASCII)


def problem(row: Row) -> Problem:
    """The question, and the number as `data["answer"]`.

    Raises:
        RowError: a column is missing or empty, or no number follows `####`.
    """
    _, mark, last = text(row, "answer").rpartition("####")
    if not mark:
        raise RowError("answer", "no '####' with the result after it")
    # Some exporters put a blank after the sign or between groups of digits.
    answer = plain_number(re.sub(r"(?<=[-+\d,$])\s+(?=[\d$])", "", last))
    if not _PLAIN.fullmatch(answer):
        raise RowError("answer", f"{last.strip()!r} after '####' is not a number")
    return Problem(text(row, "question").strip() + "\n", "gsm8k", {"answer": answer})
