"""The GSM8K task: word problems as in the mathematics task, under GSM8K's three binary rewards."""

from __future__ import annotations

from gdpo_tune.core.registry import TaskInfo, weigh_equally
from gdpo_tune.tasks.answers import ANSWER_REQUEST
from gdpo_tune.tasks.base import get_ranges, measure_rewards
from gdpo_tune.tasks.built_in_task import BuiltInTask
from gdpo_tune.tasks.math_problems import PROMPTS, generate
from gdpo_tune.tasks.rewards import gsm8k_correctness, gsm8k_format, gsm8k_integer, length

REWARDS = (gsm8k_correctness.REWARD, gsm8k_integer.REWARD, gsm8k_format.REWARD)
METRICS = {
    **measure_rewards((*REWARDS, length.REWARD)),
    "mean_length": length.MEAN_LENGTH,
}


class GSM8KTask(BuiltInTask):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    reward_infos = REWARDS
    metric_infos = METRICS
    generate = staticmethod(generate)
    format_request = ANSWER_REQUEST


TASK = TaskInfo(
    build=GSM8KTask,
    rewards=get_ranges(REWARDS),
    metrics=METRICS,
    published=weigh_equally(get_ranges(REWARDS)),
    embedded="embedded_math",
    prompts=PROMPTS,
)
