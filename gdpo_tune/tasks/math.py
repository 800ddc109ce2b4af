"""The mathematics task: answer a word problem with a whole number, in few tokens."""

from __future__ import annotations

from gdpo_tune.core.registry import TaskInfo, weigh_equally
from gdpo_tune.tasks.answers import ANSWER_REQUEST
from gdpo_tune.tasks.base import get_ranges, measure_rewards
from gdpo_tune.tasks.built_in_task import BuiltInTask
from gdpo_tune.tasks.math_problems import PROMPTS, generate
from gdpo_tune.tasks.rewards import answer_correctness, block_format, length

REWARDS = (answer_correctness.REWARD, block_format.REWARD, length.REWARD)
METRICS = {**measure_rewards(REWARDS), "mean_length": length.MEAN_LENGTH}


class MathTask(BuiltInTask):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    reward_infos = REWARDS
    metric_infos = METRICS
    generate = staticmethod(generate)
    format_request = ANSWER_REQUEST


TASK = TaskInfo(
    build=MathTask,
    rewards=get_ranges(REWARDS),
    metrics=METRICS,
    published=weigh_equally(get_ranges(REWARDS)),
    embedded="embedded_math",
    prompts=PROMPTS,
    length_reward="length",
)
