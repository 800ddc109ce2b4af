"""The GSM8K task: word problems as in the mathematics task, under GSM8K's three binary rewards."""

from __future__ import annotations

from gdpo_tune.tasks.answers import ANSWER_REQUEST
from gdpo_tune.tasks.base import measure_rewards
from gdpo_tune.tasks.built_in_task import BuiltInTask
from gdpo_tune.tasks.math_problems import PROMPTS, generate
from gdpo_tune.tasks.rewards import gsm8k_correctness, gsm8k_format, gsm8k_integer, length


class GSM8KTask(BuiltInTask):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    reward_infos = (gsm8k_correctness.REWARD, gsm8k_integer.REWARD, gsm8k_format.REWARD)
    metric_infos = {
        **measure_rewards((*reward_infos, length.REWARD)),
        "mean_length": length.MEAN_LENGTH,
    }
    generate = staticmethod(generate)
    format_request = ANSWER_REQUEST


TASK = GSM8KTask.describe("embedded_math", PROMPTS)
