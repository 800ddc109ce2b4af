"""The mathematics task: answer a word problem with a whole number, in few tokens.

rewards, all 0 or 1:  correctness   the answer is right, numbers compared by value
                      format        exactly one think block and one answer block
                      length        at most `settings.length_limit` tokens
metrics, held out:    the same three, and `mean_length` in tokens

Correctness does not ask for the format: the answer is found wherever it is
(`math_rewards.final_answer`), so that the objectives stay independent.
"""

from __future__ import annotations

from gdpo_tune.tasks.base import Problem, WithoutProcesses
from gdpo_tune.tasks.data import FromData
from gdpo_tune.tasks.math_problems import generate
from gdpo_tune.tasks.math_rewards import ANSWER_REQUEST, final_answer, same_answer
from gdpo_tune.tasks.rewards import format_reward


class MathTask(FromData, WithoutProcesses):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    rewards = ("correctness", "format", "length")
    metrics = ("correctness", "format", "length", "mean_length")
    _generate = staticmethod(generate)
    format_request = ANSWER_REQUEST

    def _judge(self, problem: Problem, completion: str) -> dict[str, float]:
        right = same_answer(final_answer(completion), problem.data["answer"])
        return {"correctness": float(right), "format": format_reward(completion)}
