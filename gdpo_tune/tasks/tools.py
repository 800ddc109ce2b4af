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

from gdpo_tune.tasks.base import Problem, Scores, WithoutProcesses
from gdpo_tune.tasks.data import FromData
from gdpo_tune.tasks.rewards import length_reward
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
        """Judge N completions, for training and for held-out evaluation alike.

        Args:
            problems: N problems, the one that each completion answers.
            completions: N texts, decoded without the end token.
            lengths: N token counts, the end token included.
        """
        pairs = list(zip(problems, completions, strict=True))
        correct = [tools_correctness(text, problem.data["calls"]) for problem, text in pairs]
        formats = [
            tools_format(text, calls=bool(problem.data["calls"]), response=problem.data["response"])
            for problem, text in pairs
        ]
        short = [length_reward(length, self._settings.length_limit) for length in lengths]
        signal = [
            value if problem.data["calls"] else None
            for problem, value in zip(problems, correct, strict=True)
        ]
        metrics = {
            "correctness": correct,
            "exact": [float(value == HIGHEST) for value in correct],
            "format": formats,
            "length": short,
            "mean_length": [float(length) for length in lengths],
        }
        rewards = {"correctness": signal, "format": formats, "length": short}
        return Scores(rewards=rewards, metrics=metrics)
