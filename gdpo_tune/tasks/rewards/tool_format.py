"""`format` of the task `tools`: 1 for exactly the tags that the right answer has, in order.

The authors' code is less strict, which `scoring: released` chooses: it strips the completion, does
not count the think tags, and counts the others only if the right answer has them.

Source: arXiv 2504.13958 (ToolRL), arXiv 2601.05242 (GDPO); see `tool_correctness`.
"""

import re

from gdpo_tune.tasks.base import RewardInfo, Sample

_TAGS = ("think", "tool_call", "response")
_THINK = r"<think>.*?</think>"
_CALLS = r"\n<tool_call>\n.*?\n</tool_call>"
_RESPONSE = r"\n<response>.*?</response>"


def score_tool_format(sample: Sample) -> float:
    """Return 1.0 for the tags of the right answer, once each and in order, else 0.0.

    `data["calls"]` of the problem are the right calls; `data["response"]` is true if the right
    answer also speaks to the user.
    """
    calls, response = bool(sample.problem.data["calls"]), bool(sample.problem.data["response"])
    for tag, expected in zip(_TAGS, (True, calls, response), strict=True):
        for mark in (f"<{tag}>", f"</{tag}>"):
            if sample.completion.count(mark) != expected:
                return 0.0
    return float(_has_blocks(sample.completion, calls=calls, response=response))


def score_released_tool_format(sample: Sample) -> float:
    """Return 1.0 for the blocks of the right answer in order, as the authors' code finds them."""
    calls, response = bool(sample.problem.data["calls"]), bool(sample.problem.data["response"])
    completion = sample.completion.strip()
    for tag in ["tool_call"] * calls + ["response"] * response:
        if completion.count(f"<{tag}>") != 1 or completion.count(f"</{tag}>") != 1:
            return 0.0
    return float(_has_blocks(completion, calls=calls, response=response))


def _has_blocks(completion: str, *, calls: bool, response: bool) -> bool:
    """Return whether a completion begins, continues and ends with the blocks that are due."""
    blocks = _THINK + _CALLS * calls + _RESPONSE * response
    return re.match(f"^{blocks}$", completion, flags=re.DOTALL) is not None


REWARD = RewardInfo(
    "format",
    0,
    1,
    score_tool_format,
    "share with the tags that the answer needs, in order",
    released=score_released_tool_format,
)
