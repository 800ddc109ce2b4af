"""One training step of ours and of plain `trl.GRPOTrainer` in seconds, for `gpu_check.py`.

Ours is a trial as a sweep runs it, without held-out evaluation and checkpoints. Both sides train
every weight of the same policy on the same prompts, in the same precision. Both use the same engine
and rewards that cost nothing. Blocks of steps alternate. Each block has its own process, as trials
on a GPU have, because the memory of engines adds up in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alternation import Block, Pair, Side, alternate
from gpu_step_plan import Plan

if TYPE_CHECKING:
    from gpu_check_processes import Processes

BLOCK = f"{__name__}:run_block"


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


def run_block(plan: Plan, ours: bool, seed: int) -> Block:
    """Run one block in this process, which alone imports torch."""
    from gpu_step_block import run

    return run(plan, ours, seed)


def find_peak(side: Side) -> int | None:
    """Return the most MiB of a GPU that a block allocated; None on a CPU."""
    peaks = [one.peak_mib for one in side.blocks if one.peak_mib is not None]
    return round(max(peaks)) if peaks else None
