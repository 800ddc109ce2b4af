"""Two trainers in turns, timed step by step: ours, and plain `trl.GRPOTrainer`.

On a GPU, ours is a trial as a sweep runs it, without held-out evaluation and checkpoints. Both
sides train every weight of the same policy on the same prompts, in the same precision, with the
same engine and rewards that cost nothing. Each block has its own process, as trials on a GPU have,
because the memory of engines adds up in one process. This module imports no torch, so the process
that starts the blocks stays light.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness import build_trial

from gdpo_tune.core.settings import ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig

if TYPE_CHECKING:
    from gpu_check_sweeps import Processes


LENGTH_TOLERANCE = 0.02


@dataclass(frozen=True)
class Block:
    """Measurements of a few steps of one trainer."""

    seconds: float
    """Seconds of one step."""
    lengths: list[float]
    """Mean tokens of a completion, one entry a counted step."""
    peak_mib: float | None = None
    """Peak allocation on the GPU; None if it was not measured."""
    device: str = "cpu"


class Stopwatch:
    """Time and completion lengths of the steps of one block after the warm-up."""

    def __init__(self, steps: int, clock: Callable[[], float], warm_up: int = 1) -> None:
        """Create a stopwatch.

        Args:
            steps: number of counted steps.
            clock: returns seconds, of wall time or CPU time.
            warm_up: steps before the counted ones, at least 1.
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

    def build_block(self, peak_mib: float | None = None, device: str = "cpu") -> Block:
        """Build the block of all counted steps.

        Raises:
            ValueError: a counted step is missing.
        """
        counted, wanted = len(self._lengths), self.last - self._warm_up
        if counted != wanted:
            raise ValueError(f"{counted} of {wanted} steps were timed")
        seconds = (self._ended - self._started) / wanted
        return Block(seconds, self._lengths, peak_mib, device)


@dataclass
class Side:
    """All blocks of one of the two trainers."""

    blocks: list[Block] = field(default_factory=list)

    def compute_seconds(self) -> float:
        """Compute the seconds of a step: the median over the blocks."""
        return statistics.median(block.seconds for block in self.blocks)

    def compute_length(self) -> float:
        """Compute the mean tokens of a completion over all counted steps."""
        return statistics.fmean(length for block in self.blocks for length in block.lengths)


@dataclass
class Pair:
    """Ours and plain TRL, block by block."""

    ours: Side = field(default_factory=Side)
    plain: Side = field(default_factory=Side)

    def compute_length_gap(self) -> float:
        """Compute the relative difference in length between our completions and TRL's."""
        return abs(self.ours.compute_length() / self.plain.compute_length() - 1)

    def build_figures(self, unit: str) -> dict[str, object]:
        """Build the figures for a line of JSON; ratios are over pairs of blocks.

        Args:
            unit: unit of the seconds, as part of a key: `cpu_seconds`.
        """
        sides = zip(self.ours.blocks, self.plain.blocks, strict=True)
        ratios = [ours.seconds / plain.seconds for ours, plain in sides]
        return {
            "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(min(ratios), 3),
            "ratio_high": round(max(ratios), 3),
            f"ours_{unit}": round(self.ours.compute_seconds(), 4),
            f"trl_{unit}": round(self.plain.compute_seconds(), 4),
            "ours_mean_length": round(self.ours.compute_length(), 2),
            "trl_mean_length": round(self.plain.compute_length(), 2),
            "lengths_apart": round(self.compute_length_gap(), 4),
            "blocks": len(ratios),
        }


def alternate(run: Callable[[bool, int], Block], blocks: int, most: int) -> Pair:
    """Train both sides in turns until their completions are equally long on average.

    A noisy machine then affects both sides alike.

    Args:
        run: runs one block; takes True for our side, and a seed that both sides get.
        blocks: least number of blocks of each side.
        most: largest number of blocks of each side, even if completion lengths differ.
    """
    pair = Pair()
    for seed in range(most):
        order = [(True, pair.ours), (False, pair.plain)]
        for is_ours, side in order if seed % 2 else reversed(order):
            side.blocks.append(run(is_ours, seed))
        if seed + 1 >= blocks and pair.compute_length_gap() <= LENGTH_TOLERANCE:
            break
    return pair


BLOCK = "gpu_check_trials:run"
"""What runs one block in a process of its own, which alone imports torch."""


def measure(
    plan: Plan, blocks: int, most: int, processes: Processes, step: str, seconds: float
) -> Pair:
    """Measure both trainers in turns, each block in its own process.

    Args:
        plan: work of both trainers.
        blocks: least number of blocks of each side.
        most: largest number of blocks of each side.
        processes: that run the blocks.
        step: step of the check, whose log gets the output.
        seconds: time of one block.

    Raises:
        StepError: a block failed, or did not end in time.
    """

    def run(ours: bool, seed: int) -> Block:
        return processes.call(step, BLOCK, plan, ours, seed, seconds=seconds)

    return alternate(run, blocks, most)


def find_peak(side: Side) -> int | None:
    """Return the most MiB of a GPU that a block allocated; None on a CPU."""
    peaks = [one.peak_mib for one in side.blocks if one.peak_mib is not None]
    return round(max(peaks)) if peaks else None


TASK = f"{Path(__file__).resolve().with_name('lookup_task.py')}:LookupTask"
TRAIN_PROMPTS = 1024


@dataclass(frozen=True)
class Plan:
    """Work of both trainers."""

    policy: str
    engine: str
    """`transformers` or `vllm`."""
    prompts: int
    """Prompts of a step."""
    group_size: int
    tokens: int
    """Tokens of the longest completion."""
    steps: int
    """Counted steps of a block."""
    warm_up: int
    threads: int
    model: ModelSettings
    vllm_memory_share: float = 0.3
    """Share of the GPU's memory for vLLM; weights and optimizer state take more than half."""

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
                train_prompts=TRAIN_PROMPTS,
                evaluate_every=steps,
                checkpoint_every=steps,
            ),
            threads=self.threads,
            model=self.model,
            rollout=RolloutSettings(engine=self.engine, vllm_memory_share=self.vllm_memory_share),
        )
