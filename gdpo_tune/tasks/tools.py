"""The tools task: answer a request with calls of the tools on offer, in few tokens."""

from __future__ import annotations

from gdpo_tune.tasks.base import Sample, TaskMetric, measure_rewards
from gdpo_tune.tasks.built_in_task import BuiltInTask
from gdpo_tune.tasks.rewards import length, tool_correctness, tool_format
from gdpo_tune.tasks.rewards.tool_correctness import HIGHEST, LOWEST, measure_agreement
from gdpo_tune.tasks.tools_problems import generate


def is_exact(sample: Sample) -> float:
    """Return 1.0 if the calls are right in full, else 0.0."""
    return float(measure_agreement(sample) == HIGHEST)


class ToolsTask(BuiltInTask):
    """Requests to an assistant with tools.

    Of a problem, `data["calls"]` are the right calls, each with `name` and `parameters`, and
    `data["response"]` says whether the answer also speaks to the user.
    """

    reward_infos = (tool_correctness.REWARD, tool_format.REWARD, length.REWARD)
    metric_infos = {
        # Unlike the reward, the metric counts requests for which no call is right.
        "correctness": TaskMetric(
            "maximize", LOWEST, HIGHEST, tool_correctness.REWARD.doc, measure_agreement
        ),
        "exact": TaskMetric(
            "maximize", 0, 1, "share of completions with the right calls exactly", is_exact
        ),
        **measure_rewards((tool_format.REWARD, length.REWARD)),
        "mean_length": length.MEAN_LENGTH,
    }
    generate = staticmethod(generate)
    format_request = (
        "Think first, between <think> and </think>. To call tools, write <tool_call> on the next "
        'line, then each call as a JSON object on one line, {{"name": "...", "parameters": '
        "{{...}}}}, then </tool_call> on a line. To say something to the user, write it last, on a "
        "new line, between <response> and </response>. Use each pair of tags at most once, and at "
        "most {limit} tokens in all."
    )


TASK = ToolsTask.describe(
    "embedded_tools",
    {"train": 30_000, "validation": 14_000, "test": 14_000},
    length_reward="length",
)
