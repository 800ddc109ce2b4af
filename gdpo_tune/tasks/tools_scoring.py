"""How well a completion calls the right tools: format in {0, 1}, correctness in [-3, 3].

A completion thinks, calls tools and answers, each part optional but the first:

    <think>why</think>
    <tool_call>
    {"name": "pay", "parameters": {"to": "Ann", "sum": 7}}
    </tool_call>
    <response>text for the user</response>

Correctness is `6 * score / most - 3`. `score` adds the Jaccard index of the two multisets of tool
names and, for each right call that is matched with a call of the same name, the Jaccard index of
the parameter names and the number of right parameters whose value is hit exactly; `most` is what
the right calls themselves get: 1 + calls + their parameters.

Kept from the released code, although a reader may not expect it:

- only the first tool_call block counts, from its first tag on: a tag that is mentioned in the
  thoughts is taken for it, which gives -3; neither a missing end tag nor missing thoughts matter;
- one JSON object a line, so a blank line between calls, or an object over several lines, gives -3;
- lines end at a line feed alone, not at U+2028 and its kin, which JSON allows in a text;
- values are compared as Python does: `1 == True` and `3.0 == 3` are hits, `"1"` for `1` is not;
- keys of a call beside `name` and `parameters` cost nothing: such a call still earns 3.

Not kept: the released code matches calls greedily, so the value of the same calls depends on their
order; here they are matched so that the score is largest, as the paper's words have it. And any
call without a `name` and an object of `parameters` gives -3, also one of a tool that is not wanted.

Source: arXiv 2504.13958 (ToolRL), arXiv 2601.05242 (GDPO).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

LOWEST, HIGHEST = -3.0, 3.0
_TAGS = ("think", "tool_call", "response")
_THINK = r"<think>.*?</think>"
_CALLS = r"\n<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"\n<response>.*?</response>"

Call = Mapping[str, Any]
"""A tool's `name` and its `parameters`."""


def tools_format(completion: str, *, calls: bool, response: bool) -> float:
    """1.0 for exactly the tags that the right answer has, once each and in order, else 0.0.

    Args:
        completion: the text.
        calls: whether the right answer calls tools.
        response: whether the right answer speaks to the user.
    """
    wanted = dict(zip(_TAGS, (True, calls, response), strict=True))
    for tag, present in wanted.items():
        for mark in (f"<{tag}>", f"</{tag}>"):
            if completion.count(mark) != present:
                return 0.0
    blocks = _THINK + _CALLS * calls + _RESPONSE * response
    return float(re.match(f"^{blocks}$", completion, flags=re.DOTALL) is not None)


def tools_correctness(completion: str, right: Sequence[Call]) -> float:
    """How well the calls in a completion agree with the right ones, from -3 to 3.

    Where no call is right, this is 3 without a tool_call block and -3 with one; as a reward it is
    then left out, because nearly all completions of a group agree.
    """
    if not right:
        return LOWEST if "<tool_call>" in completion else HIGHEST
    called = parse_calls(completion)
    if called is None:
        return LOWEST
    score = jaccard([call["name"] for call in right], [call["name"] for call in called])
    score += _matched(right, called)
    most = 1 + sum(1 + len(call["parameters"]) for call in right)
    return (HIGHEST - LOWEST) * score / most + LOWEST


def parse_calls(completion: str) -> list[Call] | None:
    """The calls of the first tool_call block; None if there is none or one of them is broken."""
    _, tag, rest = completion.partition("<tool_call>")
    if not tag:
        return None
    calls: list[Call] = []
    for line in rest.partition("</tool_call>")[0].strip().split("\n"):
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict):
            return None
        if not isinstance(call.get("name"), str) or not isinstance(call.get("parameters"), dict):
            return None
        calls.append(call)
    return calls


def jaccard(one: Sequence[str], other: Sequence[str]) -> float:
    """Size of the intersection of two multisets over that of their union; 1 if both are empty."""
    first, second = Counter(one), Counter(other)
    union = (first | second).total()
    return (first & second).total() / union if union else 1.0


def agreement(right: Call, called: Call) -> float:
    """What a pair of calls adds to the score; 0 if they name different tools."""
    if right["name"] != called["name"]:
        return 0.0
    wanted, given = right["parameters"], called["parameters"]
    hits = sum(key in given and bool(given[key] == value) for key, value in wanted.items())
    return jaccard(list(wanted), list(given)) + hits


def _matched(right: Sequence[Call], called: Sequence[Call]) -> float:
    """The largest sum of agreements in which no call is used twice."""
    values = [[agreement(one, other) for other in called] for one in right]
    if len(right) == 1 or len(called) == 1:
        return max(value for row in values for value in row)
    # Late, because it takes a third of a second and most answers are a single call.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(values, maximize=True)
    return sum(values[row][column] for row, column in zip(rows, columns, strict=True))
