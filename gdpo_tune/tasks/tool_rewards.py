"""Rewards of tool calls: `tool_calls`, agreement with the right calls from -3 to 3; `tool_format`.

A completion thinks, calls tools and answers. Each part is optional but the first:

    <think>why</think>
    <tool_call>
    {"name": "pay", "parameters": {"to": "Ann", "sum": 7}}
    </tool_call>
    <response>text for the user</response>

Agreement is `6 * score / most - 3`. `score` starts with the Jaccard index of the two multisets of
tool names. Each right call that is matched with a call of the same name adds the Jaccard index of
the parameter names and the number of right parameters with an equal value. `most` is the score of
the right calls themselves: 1 + calls + their parameters.

Kept from the released code, although a reader may not expect it:

- only the first tool_call block counts, even a tag that the thoughts mention, which gives -3;
- one JSON object a line, so a blank line between calls, or an object over several lines, gives -3;
- lines end at a line feed alone, not at U+2028 and similar signs, which JSON allows in a text;
- values are compared as Python does: `1 == True` and `3.0 == 3` are equal, `"1"` and `1` are not;
- other keys of a call than `name` and `parameters` cost nothing.

Not kept, unless a sweep has `scoring: released` (`released_tool_calls`):

- the released code matches calls greedily, so the value of the same calls depends on their order;
  here the matching is the one with the largest score, as the paper says;
- without an end tag anywhere it gives -3; here the block then ends with the completion;
- a second start tag ends its block; here it is a broken call;
- a call of a tool that is not wanted needs only a `name`, of any type; here each call has a text as
  its `name` and an object of `parameters`, or all give -3;
- a request for which no call is right earns 0; here it is not scored.

Source: arXiv 2504.13958 (ToolRL), arXiv 2601.05242 (GDPO); `reward_score/rlla.py`, the same file in
github.com/NVlabs/GDPO at b080e63 and in github.com/qiancheng0/ToolRL at 8cee13e.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gdpo_tune.tasks.text_rewards import reward

LOWEST, HIGHEST = -3.0, 3.0

ToolCall = Mapping[str, Any]
"""A tool's `name` and its `parameters`."""


@reward(LOWEST, HIGHEST, "mean agreement with the right calls")
def tool_calls(completion: str, calls: Sequence[ToolCall]) -> float | None:
    """Return the agreement with the right calls, the column `calls`; None if no call is right.

    Without a right call nearly all completions of a group agree: the reward would only add noise.
    """
    return measure_agreement(completion, calls) if calls else None


@reward(LOWEST, HIGHEST, "mean agreement with the right calls")
def agreement(completion: str, calls: Sequence[ToolCall]) -> float:
    """Return the same, and for requests for which no call is right, too."""
    return measure_agreement(completion, calls)


@reward(0, 1, "share of completions with the right calls exactly")
def exact_calls(completion: str, calls: Sequence[ToolCall]) -> float:
    """Return 1.0 if the calls are the right ones, else 0.0."""
    return float(measure_agreement(completion, calls) == HIGHEST)


def measure_agreement(completion: str, right: Sequence[ToolCall]) -> float:
    """Return the agreement from -3 to 3; if no call is right, 3 without a block and -3 with one."""
    if not right:
        return LOWEST if "<tool_call>" in completion else HIGHEST
    called = parse_calls(completion)
    if called is None:
        return LOWEST
    return _scale(_compare_names(right, called) + _match_calls(right, called), right)


def _compare_names(right: Sequence[ToolCall], called: Sequence[ToolCall]) -> float:
    return compute_jaccard([call["name"] for call in right], [call["name"] for call in called])


def _scale(score: float, right: Sequence[ToolCall]) -> float:
    most = 1 + sum(1 + len(call["parameters"]) for call in right)
    return (HIGHEST - LOWEST) * score / most + LOWEST


def write_calls(thought: str, calls: Sequence[ToolCall]) -> str:
    """Return a completion in the rewarded format that makes calls and says nothing else."""
    lines = "\n".join(map(json.dumps, calls))
    return f"<think>{thought}</think>\n<tool_call>\n{lines}\n</tool_call>"


def parse_calls(completion: str) -> list[ToolCall] | None:
    """Return the calls of the first tool_call block; None if it is missing or a call is broken."""
    _, tag, rest = completion.partition("<tool_call>")
    calls = _read_lines(rest.partition("</tool_call>")[0]) if tag else None
    for call in calls or ():
        match call:
            case {"name": str(), "parameters": dict()}:
                pass
            case _:
                return None
    return calls


def _read_lines(block: str) -> list[Any] | None:
    try:
        return [json.loads(line) for line in block.strip().split("\n")]
    except (ValueError, RecursionError):
        return None


def compute_jaccard(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the intersection of two multisets over their union, by size; 1 if both are empty."""
    shared = (Counter(one) & Counter(other)).total()
    union = len(one) + len(other) - shared
    return shared / union if union else 1.0


def compare_calls(right: ToolCall, called: ToolCall) -> float:
    """Return what a pair of calls adds to the score; 0 if they name different tools."""
    if right["name"] != called["name"]:
        return 0.0
    expected, used = right["parameters"], called["parameters"]
    hits = sum(key in used and bool(used[key] == value) for key, value in expected.items())
    return compute_jaccard(list(expected), list(used)) + hits


def _match_calls(right: Sequence[ToolCall], called: Sequence[ToolCall]) -> float:
    """Return the largest sum of agreements in which no call is used twice."""
    values = [[compare_calls(one, other) for other in called] for one in right]
    if len(right) == 1 or len(called) == 1:
        return max(value for row in values for value in row)
    # Late, because it takes a third of a second and most answers are a single call.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(values, maximize=True)
    return sum(values[row][column] for row, column in zip(rows, columns, strict=True))


@reward(LOWEST, HIGHEST, "mean agreement with the right calls")
def released_tool_calls(completion: str, calls: Sequence[ToolCall]) -> float:
    """Return the agreement of a completion's calls as the authors' code measures it."""
    if not calls:
        return 0.0
    called = parse_released_calls(completion, {call["name"] for call in calls})
    if called is None:
        return LOWEST
    score = _compare_names(calls, called)
    for wanted in calls:
        values = [compare_calls(wanted, other) for other in called]
        best = max(values, default=0.0)
        if best > 0:
            score += best
            del called[values.index(best)]
    return _scale(score, calls)


def parse_released_calls(completion: str, wanted: Collection[str]) -> list[ToolCall] | None:
    """Return the calls between the first start tag and the next tag; None if one is broken.

    Only calls of the `wanted` tools need an object of parameters.
    """
    if "<tool_call>" not in completion or "</tool_call>" not in completion:
        return None
    calls = _read_lines(completion.split("<tool_call>")[1].partition("</tool_call>")[0])
    for call in calls or ():
        match call:
            case {"name": list() | dict()}:
                return None
            case {"name": _, "parameters": dict()}:
                pass
            case {"name": name} if name not in wanted:
                pass
            case _:
                return None
    return calls


_TAGS = ("think", "tool_call", "response")
_THINK = r"<think>.*?</think>"
_CALLS = r"\n<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"\n<response>.*?</response>"


@reward(0, 1, "share with the tags that the answer needs, in order")
def tool_format(completion: str, calls: Sequence[ToolCall], response: bool = False) -> float:
    """Return 1.0 for the tags of the right answer, once each and in order, else 0.0."""
    for tag, expected in zip(_TAGS, (True, bool(calls), response), strict=True):
        for mark in (f"<{tag}>", f"</{tag}>"):
            if completion.count(mark) != expected:
                return 0.0
    return _match_blocks(completion, calls, response)


@reward(0, 1, "share with the tags that the answer needs, in order")
def released_tool_format(
    completion: str, calls: Sequence[ToolCall], response: bool = False
) -> float:
    """Return the same by the authors' code, which counts the tags of the right answer alone."""
    completion = completion.strip()
    for tag in ["tool_call"] * bool(calls) + ["response"] * response:
        if completion.count(f"<{tag}>") != 1 or completion.count(f"</{tag}>") != 1:
            return 0.0
    return _match_blocks(completion, calls, response)


def _match_blocks(completion: str, calls: Sequence[ToolCall], response: bool) -> float:
    blocks = _THINK + _CALLS * bool(calls) + _RESPONSE * response
    return float(re.match(f"^{blocks}$", completion, flags=re.DOTALL) is not None)
