"""What a trainer of the step benchmarks is made of: rewards that cost nothing, and its clock."""

from __future__ import annotations

import zlib

from alternation import Stopwatch
from transformers import TrainerCallback


class Timed(TrainerCallback):
    """Tells a stopwatch of every step."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_log(self, args, state, control, logs=None, **_):
        """Called once a step, and once more at the end without a loss."""
        if logs is not None and "loss" in logs:
            self.watch.end_step(state.global_step, logs["completions/mean_length"])


def build_lookup_reward(name: str):
    """A reward that costs nothing: 0 or 1 from the prompt's and completion's bytes."""

    def reward(prompts, completions, **_):
        return [
            float(zlib.crc32(f"{name}{prompt}{text}".encode()) & 1)
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    reward.__name__ = name
    return reward


REWARDS = [
    build_lookup_reward("correctness"),
    build_lookup_reward("format"),
    build_lookup_reward("length"),
]
