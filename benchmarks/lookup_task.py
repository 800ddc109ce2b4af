"""Task whose rewards cost nothing, so that a benchmark measures the trainer and not the rewards."""

from __future__ import annotations

import zlib

from gdpo_tune.tasks.custom import RewardFunctionTask

ROWS = 2000
"""Number of prompts; about 70 of 100 are for training."""


def build_lookup_reward(name: str):
    """Build a reward that costs nothing: 0 or 1 from the bytes of prompt and completion."""

    def score(prompts, completions, **_):
        return [
            float(zlib.crc32(f"{name}{prompt}{text}".encode()) & 1)
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    score.__name__ = name
    return score


REWARDS = [build_lookup_reward(name) for name in ("correctness", "format", "length")]


class LookupTask(RewardFunctionTask):
    """Short prompts, as the embedded policy knows them, and rewards that cost nothing."""

    reward_funcs = REWARDS
    ranges = {reward.__name__: (0.0, 1.0) for reward in REWARDS}
    repeats = 1
    """Copies of its text in a prompt."""

    def rows(self):
        """Return every prompt; rewards need no other column."""
        text = "Write f(x): k is {row}, plus 9\n"
        return [{"prompt": text.format(row=row) * self.repeats} for row in range(ROWS)]


class LongLookupTask(LookupTask):
    """The same with prompts of several hundred tokens."""

    repeats = 30
