"""Functions that `gpu_check.py` runs in a process of its own: single trials, and a neighbour.

They return plain figures. The functions of `gpu_check_steps.py` judge them.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import train

UNSTEADY = ("gpu_utilisation", "gpu_memory")
"""Metrics that differ from run to run."""
PIECES = 40
"""Pieces in which a neighbour takes its share of the memory."""
PAUSE = 0.25
"""Seconds between two of its allocations."""


@dataclass
class TrainedTrial:
    """What a trial reported."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> its metrics, without the unsteady ones."""
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    checkpoint: str = ""
    copied: str = ""
    """Copy of the checkpoint at `copy_at`."""
    random_states: int = 0
    """Generator states of GPUs in that checkpoint."""
    peak_bytes: int = 0
    """Most bytes that torch reserved on the GPU; 0 on a CPU."""


def train_trial(config: TrialConfig, resume: str = "", copy_at: int = 0) -> TrainedTrial:
    """Train one trial, and copy its checkpoint at a step.

    Args:
        config: of the trial.
        resume: checkpoint to continue from; empty for none.
        copy_at: step whose checkpoint is copied, because a trial keeps only the newest ones.
    """
    result = TrainedTrial()

    def report(measurement, checkpoint) -> None:
        result.metrics[measurement.step] = {
            name: value
            for name, value in measurement.metrics.items()
            if not any(word in name for word in UNSTEADY)
        }
        if checkpoint is not None and measurement.step == copy_at:
            target = config.directory / "copied" / checkpoint.name
            result.copied = str(shutil.copytree(checkpoint, target))
            result.random_states = count_device_states(target)

    started = time.monotonic()
    outcome = train(config, resume=Path(resume) if resume else None, report=report)
    result.seconds = time.monotonic() - started
    result.test = {name: estimate.mean for name, estimate in outcome.test.items()}
    result.checkpoint = str(outcome.checkpoint or "")
    if torch.cuda.is_available():
        result.peak_bytes = torch.cuda.max_memory_reserved()
    return result


def measure_first_steps(configs: Sequence[TrialConfig]) -> list[float]:
    """Train trials one after the other in this process.

    Returns:
        Seconds from the start of each trial to its first step.
    """
    seconds: list[float] = []
    for number, config in enumerate(configs):
        started = time.monotonic()

        def report(measurement, checkpoint, number=number, started=started) -> None:
            if len(seconds) == number:
                seconds.append(time.monotonic() - started)

        train(config, resume=None, report=report)
    return seconds


def count_device_states(checkpoint: Path) -> int:
    """Count the generator states of GPUs in a checkpoint."""
    states = torch.load(checkpoint / "rng_state.pth", weights_only=False).get("cuda")
    if states is None:
        return 0
    return 1 if isinstance(states, torch.Tensor) else len(states)


@dataclass(frozen=True)
class ResumedTrial:
    """A trial that ran once without interruption and once from the checkpoint in its middle."""

    steps: list[int]
    """Steps of the second run."""
    unequal: list[str]
    """What differs between the runs, as `step 3 train/loss`."""
    largest_difference: float
    """Of a loss."""
    random_states: int
    devices: int
    """GPUs that the process sees."""


def resume_trial(config: TrialConfig) -> ResumedTrial:
    """Train a trial twice, the second time from the checkpoint in its middle."""
    middle = config.training.steps // 2
    whole = train_trial(config, copy_at=middle)
    again = replace(config, directory=config.directory.with_name(f"{config.directory.name}_again"))
    resumed = train_trial(again, resume=whole.copied)
    steps = [step for step in resumed.metrics if step > middle]
    unequal = [
        f"step {step} {name}"
        for step in steps
        for name in sorted({*whole.metrics[step], *resumed.metrics[step]})
        if not is_same(whole.metrics[step].get(name), resumed.metrics[step].get(name))
    ]
    if whole.test != resumed.test:
        unequal.append("test metrics")
    if not have_equal_weights(whole.checkpoint, resumed.checkpoint):
        unequal.append("weights")
    losses = [
        abs(whole.metrics[step]["train/loss"] - resumed.metrics[step]["train/loss"])
        for step in steps
    ]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    largest = max(losses, default=math.nan)
    return ResumedTrial(steps, unequal, largest, whole.random_states, devices)


def is_same(one: float | None, other: float | None) -> bool:
    """Return whether two figures have the same bits; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def have_equal_weights(one: str, other: str) -> bool:
    """Return whether two checkpoints hold bitwise equal policies."""
    first, second = (load_policy(path)[0].state_dict() for path in (one, other))
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def grow_and_shrink(share: float) -> None:
    """Take a share of the GPU piece by piece, release it, and begin again, until killed."""
    total = torch.cuda.get_device_properties(0).total_memory
    pieces: list[torch.Tensor] = []
    while True:
        for _ in range(PIECES):
            pieces.append(torch.ones(int(total * share / PIECES), dtype=torch.int8, device="cuda"))
            time.sleep(PAUSE)
        pieces.clear()
        torch.cuda.empty_cache()
        time.sleep(PAUSE)
