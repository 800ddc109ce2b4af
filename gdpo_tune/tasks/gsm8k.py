"""Mathematics under GSM8K's three binary rewards, whose definitions are in `math_rewards`.

rewards, all 0 or 1:  correctness   the answer is exactly the right text
                      integer       the answer consists of digits
                      format        a think block, a line break, an answer block
metrics, held out:    the same three, `length` (share within `settings.length_limit` tokens) and
                      `mean_length` in tokens
"""

from __future__ import annotations

from gdpo_tune.tasks.base import Problem, WithoutProcesses
from gdpo_tune.tasks.data import FromData
from gdpo_tune.tasks.math_problems import generate
from gdpo_tune.tasks.math_rewards import (
    ANSWER_REQUEST,
    gsm8k_correctness,
    gsm8k_format,
    gsm8k_integer,
    plain_number,
)


class GSM8KTask(FromData, WithoutProcesses):
    """Word problems as in the mathematics task, judged as in the GSM8K recipe."""

    rewards = ("correctness", "integer", "format")
    metrics = ("correctness", "integer", "format", "length", "mean_length")
    _generate = staticmethod(generate)
    format_request = ANSWER_REQUEST

    def _judge(self, problem: Problem, completion: str) -> dict[str, float]:
        return {
            "correctness": gsm8k_correctness(completion, plain_number(problem.data["answer"])),
            "integer": gsm8k_integer(completion),
            "format": gsm8k_format(completion),
        }
