"""Rewards: pure functions of one `Sample`, each with a `Reward` that has its name and range.

The code of GDPO's authors scores GSM8K differently in places, which `scoring: released` chooses.
Source: `open_r1/gsm8k.py` of github.com/NVlabs/GDPO at b080e63.
"""

from __future__ import annotations

import re

from gdpo_tune.tasks.answers import WHOLE_NUMBER, extract_answer, find_answer, is_same_answer
from gdpo_tune.tasks.base import Reward, Sample

# Every task ---------------------------------------------------------------------------------------


def score_length(sample: Sample) -> float:
    """Return 1.0 if the completion is within `training.length_limit`, else 0.0."""
    return float(sample.tokens <= sample.length_limit)


LENGTH = Reward("length", 0, 1, score_length, "share of completions within the length limit")

_BLOCKS = re.compile(
    r"<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", flags=re.DOTALL
)
_TAG = re.compile(r"</?(?:think|answer)>")


def score_block_format(sample: Sample) -> float:
    """Return 1.0 for one think block and then one answer block, else 0.0.

    White space alone may stand between and after them. The think block may be empty, so that this
    reward does not work against a short completion.
    """
    blocks = _BLOCKS.fullmatch(sample.completion.lstrip())
    return float(blocks is not None and not _TAG.search(blocks["think"] + blocks["answer"]))


BLOCK_FORMAT = Reward(
    "format", 0, 1, score_block_format, "share with exactly one think and one answer block"
)

# Code ---------------------------------------------------------------------------------------------


def score_all_passed(sample: Sample) -> float:
    """Return 1.0 if the program passes every test, hidden ones included, else 0.0."""
    return float(sample.result is not None and sample.result.passed)


def score_share_passed(sample: Sample) -> float:
    """Return the share of tests that the program passes."""
    return 0.0 if sample.result is None else sample.result.share


TESTS_PASSED = Reward(
    "correctness",
    *(0, 1, score_all_passed, "share of completions whose code passes all tests"),
    partial=score_share_passed,
)


def score_bug_free(sample: Sample) -> float:
    """Return 1.0 for a program that compiles, raises in no test and keeps the limits, else 0.0."""
    return float(sample.result is not None and not sample.result.has_bug)


BUG_FREE = Reward("bug_free", 0, 1, score_bug_free, "share whose program does not break")

# Mathematics --------------------------------------------------------------------------------------


def score_answer(sample: Sample) -> float:
    """Return 1.0 if the completion's answer equals `data["answer"]`, else 0.0.

    `data["tolerance"]` may be the largest absolute error of a number. Of problems that the task
    itself writes, answers in thoughts that never end count, as in earlier sweeps.
    """
    data = sample.problem.data
    answer = extract_answer(sample.completion, reads_open_thoughts="calculation" in data)
    return float(is_same_answer(answer, data["answer"], data.get("tolerance", 0.0)))


ANSWER = Reward("correctness", 0, 1, score_answer, "share of completions with the right answer")

# GSM8K --------------------------------------------------------------------------------------------


def score_exact_answer(sample: Sample) -> float:
    """Return 1.0 if the answer is the normalised `data["answer"]` exactly, else 0.0.

    A completion without tags is an answer. Without the normalization, this reward and `integer`
    could contradict each other.
    """
    gold = normalize_number(sample.problem.data["answer"])
    return float(_extract_finished_answer(sample.completion) == gold)


def score_released_exact_answer(sample: Sample) -> float:
    """Return 1.0 if the answer is the gold answer as the data set writes it, else 0.0."""
    data = sample.problem.data
    gold = data.get("written_answer", data["answer"])
    return float(extract_tagged_answer(sample.completion) == gold)


GSM8K_ANSWER = Reward(
    "correctness",
    *(0, 1, score_exact_answer, "share whose answer is the right text exactly"),
    released=score_released_exact_answer,
)


def score_integer(sample: Sample) -> float:
    """Return 1.0 if the answer is ASCII digits alone, so not `-5` or `1,000`, else 0.0."""
    answer = _extract_finished_answer(sample.completion)
    return float(answer.isascii() and answer.isdigit())


def score_released_integer(sample: Sample) -> float:
    """Return 1.0 if the answer consists of what Unicode calls digits, such as a circled 1."""
    return float(extract_tagged_answer(sample.completion).isdigit())


GSM8K_INTEGER = Reward(
    "integer",
    *(0, 1, score_integer, "share whose answer consists of ASCII digits"),
    released=score_released_integer,
)

_LINES = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", flags=re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def score_gsm8k_format(sample: Sample) -> float:
    """Return 1.0 for two blocks with one line break between and at most one after, else 0.0."""
    text = sample.completion
    once = all(text.count(tag) == 1 for tag in _TAGS)
    return float(once and _LINES.match(text) is not None)


def score_released_gsm8k_format(sample: Sample) -> float:
    """Return the same without counting the think tags."""
    text = sample.completion
    once = text.count("<answer>") == text.count("</answer>") == 1
    return float(once and _LINES.match(text) is not None)


GSM8K_FORMAT = Reward(
    "format",
    *(0, 1, score_gsm8k_format, "share with a think line and an answer line"),
    released=score_released_gsm8k_format,
)


# Answers in completions ---------------------------------------------------------------------------
# Correctness does not ask for the format: objectives stay independent of each other.

_NUMBER = re.compile(rf"[-+]?(?:{WHOLE_NUMBER}(?:\.\d*)?|\.\d+)", flags=re.ASCII)


def extract_tagged_answer(completion: str) -> str:
    """Return the text after the last `<answer>` up to the next `</answer>`, or all; stripped."""
    return completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def _extract_finished_answer(completion: str) -> str:
    """Return the tagged answer; empty where the completion ends within its thoughts."""
    return extract_tagged_answer(completion) if find_answer(completion)[0] else ""


def write_answer(thought: str, answer: str) -> str:
    """Return a completion in the rewarded format; both texts may be empty."""
    return f"<think>{thought}</think>\n<answer>{answer}</answer>"


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
