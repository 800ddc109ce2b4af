"""The mathematics task: answer a word problem with a whole number, in few tokens."""

from __future__ import annotations

from gdpo_tune.tasks.answers import ANSWER_REQUEST
from gdpo_tune.tasks.base import measure_rewards
from gdpo_tune.tasks.built_in_task import BuiltInTask
from gdpo_tune.tasks.math_problems import PROMPTS, generate
from gdpo_tune.tasks.rewards import answer_correctness, block_format, length


class MathTask(BuiltInTask):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    reward_infos = (answer_correctness.REWARD, block_format.REWARD, length.REWARD)
    metric_infos = {**measure_rewards(reward_infos), "mean_length": length.MEAN_LENGTH}
    generate = staticmethod(generate)
    format_request = ANSWER_REQUEST


TASK = MathTask.describe("embedded_math", PROMPTS, length_reward="length")
