"""Two trainers in turns, timed step by step: ours, and plain `trl.GRPOTrainer`.

Both train every weight of the same policy on the same prompts, in the same precision, with the same
engine and rewards that cost nothing. This module imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import build_trial

from gdpo_tune.core.settings import ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig

LENGTH_TOLERANCE = 0.02
"""Relative difference in length of completions up to which two trainers do the same work."""
TASK = f"{Path(__file__).resolve().with_name('lookup_task.py')}:LookupTask"


@dataclass(frozen=True)
class Block:
    """Measurements of a few steps of one trainer."""

    seconds: float
    """Seconds of one step."""
    lengths: list[float]
    """Mean tokens of a completion, one entry a counted step."""


class Stopwatch:
    """Time and completion lengths of the steps of one block after the warm-up."""

    def __init__(self, steps: int, clock: Callable[[], float], warm_up: int = 1) -> None:
        """Create a stopwatch of so many counted steps, after at least one that is not.

        `clock` returns seconds, of wall time or CPU time.
        """
        self.last = warm_up + steps
        """Number of the last step, the first one being 1."""
        self._warm_up = warm_up
        self._clock = clock
        self._lengths: list[float] = []

    def end_step(self, step: int, mean_length: float) -> None:
        now = self._clock()
        if step == self._warm_up:
            self._started = now
        elif step > self._warm_up:
            self._lengths.append(mean_length)
            self._ended = now

    def build_block(self) -> Block:
        """Build the block of all counted steps; a ValueError says that one is missing."""
        counted, wanted = len(self._lengths), self.last - self._warm_up
        if counted != wanted:
            raise ValueError(f"{counted} of {wanted} steps were timed")
        return Block((self._ended - self._started) / wanted, self._lengths)


def compute_length(blocks: Sequence[Block]) -> float:
    """Compute the mean tokens of a completion over all counted steps."""
    return statistics.fmean(length for block in blocks for length in block.lengths)


@dataclass
class Pair:
    """Blocks of ours and of plain TRL."""

    ours: list[Block] = field(default_factory=list)
    plain: list[Block] = field(default_factory=list)

    def compute_length_gap(self) -> float:
        """Compute the relative difference in length between our completions and TRL's."""
        return abs(compute_length(self.ours) / compute_length(self.plain) - 1)

    def build_figures(self, unit: str) -> dict[str, object]:
        """Build the figures for a line of JSON; `unit` of the seconds is part of a key.

        Ratios are over pairs of blocks.
        """
        ours, plain = ([block.seconds for block in side] for side in (self.ours, self.plain))
        ratios = [one / other for one, other in zip(ours, plain, strict=True)]
        return {
            "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(min(ratios), 3),
            "ratio_high": round(max(ratios), 3),
            f"ours_{unit}": round(statistics.median(ours), 4),
            f"trl_{unit}": round(statistics.median(plain), 4),
            "ours_mean_length": round(compute_length(self.ours), 2),
            "trl_mean_length": round(compute_length(self.plain), 2),
            "lengths_apart": round(self.compute_length_gap(), 4),
            "blocks": len(ratios),
        }


def alternate(run: Callable[[bool, int], Block], blocks: int, most: int) -> Pair:
    """Train both sides in turns until their completions are equally long on average.

    `run` runs one block; it takes True for our side, and a seed that both sides get. Each side has
    at least `blocks` of them, and at most `most`, even if completion lengths differ.
    """
    pair = Pair()
    for seed in range(most):
        order = [(True, pair.ours), (False, pair.plain)]
        for is_ours, side in order if seed % 2 else reversed(order):
            side.append(run(is_ours, seed))
        if seed + 1 >= blocks and pair.compute_length_gap() <= LENGTH_TOLERANCE:
            break
    return pair


@dataclass(frozen=True)
class Plan:
    """Work of both trainers as trials of a sweep."""

    policy: str
    engine: str
    """`transformers` or `vllm`."""
    prompts: int
    """Prompts of a step."""
    group_size: int
    tokens: int
    steps: int
    """Counted steps of a block, after those of the warm-up."""
    warm_up: int
    threads: int
    model: ModelSettings

    def build_config(self, seed: int, directory: Path) -> TrialConfig:
        """Build the timed trial; it has one more step, so that its evaluation is not timed."""
        steps = self.warm_up + self.steps + 1
        return build_trial(
            *(TASK, self.policy, directory),
            # The small rate keeps the policy, and so the lengths, equal on both sides.
            {"group_size": self.group_size, "learning_rate": 1e-7},
            seed=seed,
            training=TrainingSettings(
                steps=steps,
                completions_per_step=self.prompts * self.group_size,
                max_completion_length=self.tokens,
                length_limit=self.tokens,
                train_prompts=1024,
                evaluate_every=steps,
                checkpoint_every=steps,
            ),
            threads=self.threads,
            model=self.model,
            # Weights and optimizer state take more than half of a GPU.
            rollout=RolloutSettings(engine=self.engine, vllm_memory_share=0.3),
        )
