"""The tools task: answer a request with calls of the tools on offer, in few tokens.

rewards:              correctness   agreement with the right calls, from -3 to 3; None where none is
                                    right, since such a group would only be noise
                      format        0 or 1: the tags that the answer needs, in order
                      length        0 or 1: at most `settings.length_limit` tokens
metrics, held out:    the same three, `exact` (share whose calls are right in full: correctness 3)
                      and `mean_length` in tokens

Definitions, and how they differ from the released code: `tools_scoring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gdpo_tune.tasks.base import Problem, Scores, WithoutProcesses
from gdpo_tune.tasks.data import FromData
from gdpo_tune.tasks.tools_problems import generate
from gdpo_tune.tasks.tools_scoring import HIGHEST, tools_correctness, tools_format

_REQUEST = (
    "Think first, between <think> and </think>. To call tools, write <tool_call> on the next line, "
    'then each call as a JSON object on one line, {{"name": "...", "parameters": {{...}}}}, then '
    "</tool_call> on a line. To say something to the user, write it last, on a new line, between "
    "<response> and </response>. Use each pair of tags at most once, and at most {limit} tokens in "
    "all."
)


class ToolsTask(FromData, WithoutProcesses):
    """Requests to an assistant with tools.

    Of a problem, `data["calls"]` are the right calls, each with `name` and `parameters`, and
    `data["response"]` says whether the answer also speaks to the user.
    """

    rewards = ("correctness", "format", "length")
    metrics = ("correctness", "exact", "format", "length", "mean_length")
    _generate = staticmethod(generate)
    format_request = _REQUEST

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions; see `Task`. Where no call is right, correctness trains nothing."""
        scores = super().score(problems, completions, lengths)
        signal = [
            value if problem.data["calls"] else None
            for problem, value in zip(problems, scores.rewards["correctness"], strict=True)
        ]
        return replace(scores, rewards={**scores.rewards, "correctness": signal})

    def _judge(self, problem: Problem, completion: str) -> dict[str, float]:
        calls = problem.data["calls"]
        correctness = tools_correctness(completion, calls)
        format_kept = tools_format(completion, calls=bool(calls), response=problem.data["response"])
        exact = float(correctness == HIGHEST)
        return {"correctness": correctness, "exact": exact, "format": format_kept}
