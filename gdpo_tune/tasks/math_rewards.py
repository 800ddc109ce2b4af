"""Rewards for answers to mathematical questions. Pure functions of a completion's text.

GSM8K's three binary rewards are those of the method's GSM8K recipe, and their corners are kept:
the answer is the text after the last `<answer>` up to the next `</answer>`, stripped, and the whole
completion where there is no such tag, so a bare `42` is correct and an integer, yet not formatted;
`-5`, `1,000` and `18.0` are no integers. One thing differs: an integer is made of ASCII digits,
while `str.isdigit()` takes superscripts and circled digits, too. Gold answers are normalised before
they are compared (`plain_number`), or correctness and integer would contradict each other.
"""

from __future__ import annotations

import re

ANSWER_REQUEST = (
    "Think first, between <think> and </think>. Then write, on the next line, the answer alone "
    "between <answer> and </answer>, and nothing else. Use each pair of tags once, and at most "
    "{limit} tokens in all."
)
"""Told to a policy that has not learnt this format; `{limit}` is in tokens."""
_GSM8K = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", flags=re.DOTALL)
_GSM8K_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)", flags=re.ASCII)


def tagged_answer(completion: str) -> str:
    """The text after the last `<answer>` up to the next `</answer>`, or all of it; stripped."""
    return completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def gsm8k_correctness(completion: str, gold: str) -> float:
    """1.0 if the answer is the text `gold` exactly, else 0.0."""
    return float(tagged_answer(completion) == gold)


def gsm8k_integer(completion: str) -> float:
    """1.0 if the answer is made of ASCII digits alone, else 0.0."""
    answer = tagged_answer(completion)
    return float(answer.isascii() and answer.isdigit())


def gsm8k_format(completion: str) -> float:
    """1.0 for one think block, a line break and one answer block, each tag once, else 0.0.

    As in Python's `$`, a single line break may follow.
    """
    once = all(completion.count(tag) == 1 for tag in _GSM8K_TAGS)
    return float(once and _GSM8K.match(completion) is not None)


def final_answer(completion: str) -> str:
    """The answer of a completion, however well it is marked; empty if there is none.

    It is the text of the last answer block, which a missing end tag does not void; without one,
    the last line after the thoughts that is not blank.
    """
    if "<answer>" in completion:
        return tagged_answer(completion)
    lines = completion.rpartition("</think>")[2].strip().splitlines()
    return lines[-1].strip() if lines else ""


def same_answer(answer: str, gold: str) -> bool:
    """Whether two answers agree once numbers are written plainly."""
    return plain_number(answer) == plain_number(gold)


def plain_number(text: str) -> str:
    """A number without `$`, thousands separators, a plus sign, idle zeros or a final full stop.

    Anything but a number comes back stripped and otherwise as it was.
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
