"""Rewards that look at a completion's text and length alone. Pure functions."""

from __future__ import annotations

import re

_BLOCKS = re.compile(
    r"<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", flags=re.DOTALL
)
_TAG = re.compile(r"</?(?:think|answer)>")
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", flags=re.DOTALL)


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

    It is looked for in the last answer block, which a missing end tag does not void, else in all
    that follows the thoughts. There, the last Markdown fence that defines the function is the
    program, else the last fence. Without a fence, it is the whole answer block, or everything from
    the first `def function(` on, or, where no function is asked for, everything.

    Format is thereby judged by `format_reward` alone.

    Args:
        completion: the text.
        function: what the program must define; empty for one that reads and prints.
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
