"""The mathematics task: answer a word problem with a whole number, in few tokens.

rewards, all 0 or 1:  correctness   the answer is right, numbers compared by value
                      format        exactly one think block and one answer block
                      length        at most `settings.length_limit` tokens
metrics, held out:    the same three, and `mean_length` in tokens

Correctness does not ask for the format: the answer is found wherever it is
(`math_rewards.final_answer`), so that the objectives stay independent.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.tasks.base import Problem, Scores, WithoutProcesses
from gdpo_tune.tasks.data import FromData
from gdpo_tune.tasks.math_problems import generate
from gdpo_tune.tasks.math_rewards import ANSWER_REQUEST, final_answer, same_answer
from gdpo_tune.tasks.rewards import format_reward, length_reward


class MathTask(FromData, WithoutProcesses):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    rewards = ("correctness", "format", "length")
    metrics = ("correctness", "format", "length", "mean_length")
    _generate = staticmethod(generate)
    format_request = ANSWER_REQUEST

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions, for training and for held-out evaluation alike.

        Args:
            problems: N problems, the one that each completion answers.
            completions: N texts, decoded without the end token.
            lengths: N token counts, the end token included.
        """
        correct = [
            float(same_answer(final_answer(completion), problem.data["answer"]))
            for problem, completion in zip(problems, completions, strict=True)
        ]
        formats = [format_reward(completion) for completion in completions]
        short = [length_reward(length, self._settings.length_limit) for length in lengths]
        rewards = {"correctness": correct, "format": formats, "length": short}
        counts = [float(length) for length in lengths]
        return Scores(rewards=rewards, metrics={**rewards, "mean_length": counts})
