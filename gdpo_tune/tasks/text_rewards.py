"""Reward functions as TRL calls them, each made of a function of one completion by `reward`.

The tasks that ship use them, and `gdpo_tune.rewards` offers them to others. Columns are facts about
the problem, such as `answer`. Besides, functions may read `lengths`, the tokens of each completion;
`length_limit`, which is `training.length_limit` unless the rows say otherwise; and `result`, that
of the completion's program in the sandbox.

The code of GDPO's authors scores GSM8K differently in places, which `scoring: released` chooses.
Source: `open_r1/gsm8k.py` of github.com/NVlabs/GDPO at b080e63.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gdpo_tune.tasks.answers import WHOLE_NUMBER, extract_answer, find_answer, is_same_answer

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result


@dataclass(frozen=True)
class RangedReward:
    """A reward function in TRL's form, and its range."""

    func: Callable[..., float | None]
    """Gets a completion's text, and by their names the columns that it reads; None: not scored."""
    low: float
    high: float
    doc: str
    """Meaning of its mean over completions, in words."""

    @property
    def __name__(self) -> str:
        return self.func.__name__

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """Name of each column that it reads -> its default, or None."""
        _, *read = inspect.signature(self.func).parameters.values()
        return {each.name: None if each.default is each.empty else each.default for each in read}

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score N completions, texts or messages; where a column has None, its default counts.

        Of messages the last counts, if it is not that of a tool. `lengths` are counted in TRL's
        `completion_ids`, and `result` is that of a sandbox of this process, unless both are given.
        """
        texts = [
            one if isinstance(one, str) else one[-1]["content"] * (one[-1]["role"] != "tool")
            for one in completions
        ]
        if "lengths" in self.columns and "lengths" not in columns:
            columns["lengths"] = list(map(len, columns["completion_ids"]))
        if "result" in self.columns and "result" not in columns:
            from gdpo_tune.tasks.execution import run_stated_programs  # late: few need a sandbox

            columns["result"] = run_stated_programs(texts, columns)
        read = {
            name: [default if value is None else value for value in columns[name]]
            for name, default in self.columns.items()
            if name in columns
        }
        rows = zip(texts, *read.values(), strict=True)
        return [self.func(text, **dict(zip(read, row, strict=True))) for text, *row in rows]


def reward(low: float, high: float, doc: str = "") -> Callable[[Callable[..., Any]], RangedReward]:
    """Make a reward function of a function of one completion, with the range of its values."""
    return lambda function: RangedReward(function, low, high, doc or f"mean {function.__name__}")


def build_columns(
    data: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    length_limit: int,
    results: Sequence[Result | None] = (),
) -> dict[str, Sequence[Any]]:
    """Return the columns of N completions; a fact that a problem lacks is None."""
    names = dict.fromkeys(name for facts in data for name in facts)
    return {
        **{name: [facts.get(name) for facts in data] for name in names},
        "lengths": lengths,
        "length_limit": [length_limit] * len(data),
        "result": results or [None] * len(data),
    }


# Every task ---------------------------------------------------------------------------------------


@reward(0, 1, "share of completions within the length limit")
def length(completion: str, lengths: int, length_limit: int) -> float:
    """Return 1.0 if the completion has at most `length_limit` tokens, else 0.0."""
    return float(lengths <= length_limit)


@reward(0, float("inf"), "mean tokens of a completion")
def mean_length(completion: str, lengths: int) -> float:
    """Return the tokens of the completion, the end token included."""
    return float(lengths)


_BLOCKS = re.compile(
    r"<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", flags=re.DOTALL
)
_TAG = re.compile(r"</?(?:think|answer)>")


@reward(0, 1, "share with exactly one think and one answer block")
def block_format(completion: str) -> float:
    """Return 1.0 for one think block and then one answer block, else 0.0.

    White space alone may stand between and after them. The think block may be empty, so that this
    reward does not work against a short completion.
    """
    blocks = _BLOCKS.fullmatch(completion.lstrip())
    return float(blocks is not None and not _TAG.search(blocks["think"] + blocks["answer"]))


# Code ---------------------------------------------------------------------------------------------


@reward(0, 1, "share of completions whose code passes all tests")
def tests_passed(completion: str, result: Result | None) -> float:
    """Return 1.0 if the program passes every test, hidden ones included, else 0.0."""
    return float(result is not None and result.passed)


@reward(0, 1, "share of the tests that programs pass")
def share_passed(completion: str, result: Result | None) -> float:
    """Return the share of tests that the program passes."""
    return 0.0 if result is None else result.share


@reward(0, 1, "share whose program does not break")
def bug_free(completion: str, result: Result | None) -> float:
    """Return 1.0 for a program that compiles, raises in no test and keeps the limits, else 0.0."""
    return float(result is not None and not result.has_bug)


@reward(
    0, 1, "share with no program, or one that does not compile, raises or breaks a sandbox limit"
)
def bug_rate(completion: str, result: Result | None) -> float:
    """Return 1.0 where `bug_free` is 0, else 0.0."""
    return float(result is None or result.has_bug)


# Mathematics --------------------------------------------------------------------------------------


@reward(0, 1, "share of completions with the right answer")
def answer(completion: str, answer: str, tolerance: float = 0.0, calculation: str = "") -> float:
    """Return 1.0 if the completion's answer equals the column `answer`, else 0.0.

    `tolerance` may be the largest absolute error of a number. Of problems that the task itself
    writes, which have a `calculation`, answers in thoughts that never end count, as in earlier
    sweeps.
    """
    stated = extract_answer(completion, reads_open_thoughts=bool(calculation))
    return float(is_same_answer(stated, answer, tolerance))


# GSM8K --------------------------------------------------------------------------------------------


@reward(0, 1, "share whose answer is the right text exactly")
def exact_answer(completion: str, answer: str) -> float:
    """Return 1.0 if the answer is the normalised column `answer` exactly, else 0.0.

    A completion without tags is an answer. Without the normalization, this reward and `integer`
    could contradict each other.
    """
    return float(_extract_finished_answer(completion) == normalize_number(answer))


@reward(0, 1, "share whose answer is the right text exactly")
def released_answer(completion: str, answer: str, written_answer: str | None = None) -> float:
    """Return 1.0 if the answer is the gold answer as the data set writes it, else 0.0."""
    gold = answer if written_answer is None else written_answer
    return float(extract_tagged_answer(completion) == gold)


@reward(0, 1, "share whose answer consists of ASCII digits")
def integer(completion: str) -> float:
    """Return 1.0 if the answer is ASCII digits alone, so not `-5` or `1,000`, else 0.0."""
    stated = _extract_finished_answer(completion)
    return float(stated.isascii() and stated.isdigit())


@reward(0, 1, "share whose answer consists of ASCII digits")
def released_integer(completion: str) -> float:
    """Return 1.0 if the answer consists of what Unicode calls digits, such as a circled 1."""
    return float(extract_tagged_answer(completion).isdigit())


_LINES = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", flags=re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@reward(0, 1, "share with a think line and an answer line")
def line_format(completion: str) -> float:
    """Return 1.0 for two blocks with one line break between and at most one after, else 0.0."""
    once = all(completion.count(tag) == 1 for tag in _TAGS)
    return float(once and _LINES.match(completion) is not None)


@reward(0, 1, "share with a think line and an answer line")
def released_line_format(completion: str) -> float:
    """Return the same without counting the think tags."""
    once = completion.count("<answer>") == completion.count("</answer>") == 1
    return float(once and _LINES.match(completion) is not None)


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
