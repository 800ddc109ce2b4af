"""Task whose rewards cost nothing, so that a benchmark measures the trainer and not the rewards."""

from __future__ import annotations

import zlib

from gdpo_tune.tasks.code import CodeTask
from gdpo_tune.tasks.code_problems import generate
from gdpo_tune.tasks.custom import RewardFunctionTask

ROWS = 2000
"""Number of prompts; about 70 of 100 are for training."""
REPEATS = 30
"""Copies of its text in a long prompt."""


def build_lookup_reward(name: str):
    """Build a reward that costs nothing: 0 or 1 from the bytes of prompt and completion."""

    def score(prompts, completions, **_):
        return [
            float(zlib.crc32(f"{name}{prompt}{text}".encode()) & 1)
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    score.__name__ = name
    return score


REWARDS = [
    build_lookup_reward("correctness"),
    build_lookup_reward("format"),
    build_lookup_reward("length"),
]


class LookupTask(RewardFunctionTask):
    """Prompts and instructions of the code task, and rewards that cost nothing."""

    reward_funcs = REWARDS
    ranges = {reward.__name__: (0.0, 1.0) for reward in REWARDS}
    repeats = 1
    """Copies of its text in a prompt."""

    def __init__(self, settings, sandbox=None, data=None) -> None:
        super().__init__(settings, sandbox, data)
        self.instructions = CodeTask(settings).instructions

    def rows(self):
        """Return every prompt; rewards need no other column."""
        return [{"prompt": problem.prompt * self.repeats} for problem in generate("train", ROWS, 0)]


class LongLookupTask(LookupTask):
    """The same with prompts of several hundred tokens."""

    repeats = REPEATS
