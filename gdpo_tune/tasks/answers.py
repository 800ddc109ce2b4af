"""Find the program or the answer in a completion, however well it is marked.

Correctness does not ask for the format: objectives stay independent of each other.
"""

from __future__ import annotations

import re

ANSWER_REQUEST = (
    "Think first, between <think> and </think>. Then write, on the next line, the answer alone "
    "between <answer> and </answer>, and nothing else. Use each pair of tags once, and at most "
    "{limit} tokens in all."
)
"""Instructions for a policy that has not learnt this format; `{limit}` is in tokens."""
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", flags=re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)", flags=re.ASCII)


def extract_code(completion: str, function: str) -> str:
    """Return the program in a completion; empty if there is none.

    The program is searched in the last answer block, whose end tag may be missing. Without an
    answer block, everything after the thoughts is searched. There, the last Markdown fence that
    defines the function is the program, or else the last fence. Without a fence, the program is the
    whole answer block, or everything from the first `def function(` on. Where `function` is empty,
    because the program reads and prints, it is everything.
    """
    _, marked, answer = completion.rpartition("<answer>")
    text = answer.partition("</answer>")[0] if marked else completion.rpartition("</think>")[2]
    head = f"def {function}("
    fenced: list[str] = _FENCE.findall(text)
    if fenced:
        return next((block for block in reversed(fenced) if head in block), fenced[-1]).strip()
    if marked or not function:
        return text.strip()
    start = text.find(head)
    return text[start:].strip() if start >= 0 else ""


def extract_tagged_answer(completion: str) -> str:
    """Return the text after the last `<answer>` up to the next `</answer>`, or all; stripped."""
    return completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def extract_answer(completion: str) -> str:
    """Return the answer in a completion; empty if there is none.

    It is the text of the last answer block, whose end tag may be missing; without a block, the last
    line after the thoughts that is not blank.
    """
    if "<answer>" in completion:
        return extract_tagged_answer(completion)
    lines = completion.rpartition("</think>")[2].strip().splitlines()
    return lines[-1].strip() if lines else ""


def normalize_number(text: str) -> str:
    """Return a number without `$`, thousands separators, plus, redundant zeros or final full stop.

    Any other text comes back stripped and otherwise unchanged.
    """
    stripped = text.strip()
    number = stripped.removeprefix("$").removesuffix(".").strip()
    if not _NUMBER.fullmatch(number):
        return stripped
    whole, _, part = number.replace(",", "").removeprefix("+").partition(".")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    digits, part = digits.lstrip("0") or "0", part.rstrip("0")
    value = f"{digits}.{part}" if part else digits
    return value if value == "0" else sign + value
