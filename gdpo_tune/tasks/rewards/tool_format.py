"""`format` of the task `tools`: 1 for exactly the tags that the right answer has, in order.

Source: arXiv 2504.13958 (ToolRL), arXiv 2601.05242 (GDPO).
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
    blocks = _THINK + _CALLS * calls + _RESPONSE * response
    return float(re.match(f"^{blocks}$", sample.completion, flags=re.DOTALL) is not None)


REWARD = RewardInfo(
    "format", 0, 1, score_tool_format, "share with the tags that the answer needs, in order"
)
