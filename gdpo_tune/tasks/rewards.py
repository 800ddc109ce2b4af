"""Rewards that look at a completion's text and length alone. Pure functions."""

from __future__ import annotations

import re

_BLOCKS = re.compile(
    r"<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", flags=re.DOTALL
)
_TAG = re.compile(r"</?(?:think|answer)>")
_FENCE = re.compile(r"^```[\w+-]*\n(.*?)\n?```$", flags=re.DOTALL)


def format_reward(completion: str) -> float:
    """1.0 for exactly one think block and then exactly one answer block, else 0.0.

    White space may stand between and after the blocks, nothing else. The think block may be empty,
    so that this reward does not work against a short completion.
    """
    blocks = _BLOCKS.fullmatch(completion.lstrip())
    if blocks is None:
        return 0.0
    inner = blocks["think"] + blocks["answer"]
    return 0.0 if _TAG.search(inner) else 1.0


def length_reward(length: int, limit: int) -> float:
    """1.0 if `length` tokens are at most `limit`, else 0.0."""
    return 1.0 if length <= limit else 0.0


def extract_code(completion: str, function: str) -> str:
    """The program in a completion, however well it is marked; empty if there is none.

    It is the text of the last answer block, which a missing end tag does not void; without an
    answer block, everything from the first `def function(` after the thoughts on. One Markdown
    fence around the program is taken off. Format is thereby judged by `format_reward` alone.
    """
    _, marked, answer = completion.rpartition("<answer>")
    if marked:
        program = answer.partition("</answer>")[0]
    else:
        unthought = completion.rpartition("</think>")[2]
        start = unthought.find(f"def {function}(")
        program = unthought[start:] if start >= 0 else ""
    program = program.strip()
    fenced = _FENCE.match(program)
    return fenced[1].strip() if fenced else program
