"""Mathematics under GSM8K's three binary rewards, whose definitions are in `math_rewards`.

rewards, all 0 or 1:  correctness   the answer is exactly the right text
                      integer       the answer consists of digits
                      format        a think block, a line break, an answer block
metrics, held out:    the same three, `length` (share within `settings.length_limit` tokens) and
                      `mean_length` in tokens
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.tasks.base import Problem, Scores, WithoutProcesses
from gdpo_tune.tasks.data import FromData
from gdpo_tune.tasks.math_problems import generate
from gdpo_tune.tasks.math_rewards import (
    ANSWER_REQUEST,
    gsm8k_correctness,
    gsm8k_format,
    gsm8k_integer,
    plain_number,
)
from gdpo_tune.tasks.rewards import length_reward


class GSM8KTask(FromData, WithoutProcesses):
    """Word problems as in the mathematics task, judged as in the GSM8K recipe."""

    rewards = ("correctness", "integer", "format")
    metrics = ("correctness", "integer", "format", "length", "mean_length")
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
            gsm8k_correctness(completion, plain_number(problem.data["answer"]))
            for problem, completion in zip(problems, completions, strict=True)
        ]
        rewards = {
            "correctness": correct,
            "integer": [gsm8k_integer(completion) for completion in completions],
            "format": [gsm8k_format(completion) for completion in completions],
        }
        metrics = {
            **rewards,
            "length": [length_reward(length, self._settings.length_limit) for length in lengths],
            "mean_length": [float(length) for length in lengths],
        }
        return Scores(rewards=rewards, metrics=metrics)
