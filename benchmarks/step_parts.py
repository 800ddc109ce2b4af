"""Clock of the step benchmarks."""

from __future__ import annotations

from alternation import Stopwatch
from transformers import TrainerCallback


class Timed(TrainerCallback):
    """Callback that reports every step to a stopwatch."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_log(self, args, state, control, logs=None, **_):
        """Record a step; the trainer calls this once more at the end, without a loss."""
        if logs is not None and "loss" in logs:
            self.watch.end_step(state.global_step, logs["completions/mean_length"])
