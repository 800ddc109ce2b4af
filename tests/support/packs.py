"""Trials of a pack and the same trials alone, and the comparison of what they leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome
from gdpo_tune.training.checkpoints import OPTIMIZER_FILE

Train = Callable[..., Outcome]
WAIT = 600.0
"""Seconds after which a test gives up on a thread."""


@dataclass
class Run:
    """What one trial reported, and its outcome or error."""

    config: TrialConfig
    reports: list[Measurement] = field(default_factory=list)
    outcome: Outcome | None = None
    error: BaseException | None = None


def run_trial(
    train: Train,
    config: TrialConfig,
    resume: Path | None = None,
    on_report: Callable[[Measurement], None] = lambda _: None,
) -> Run:
    """Run one trial; its error is kept, not raised."""
    run = Run(config)

    def report(measurement: Measurement, checkpoint: Path | None) -> None:
        run.reports.append(measurement)
        on_report(measurement)

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(train, config, resume=resume, report=report)
        run.error = future.exception(WAIT)
    run.outcome = None if run.error else future.result()
    return run


def run_side_by_side(*trials: Callable[[], Run]) -> list[Run]:
    """Run trials in threads of their own, which start together."""
    start = threading.Barrier(len(trials))

    def run(trial: Callable[[], Run]) -> Run:
        start.wait(WAIT)
        return trial()

    with ThreadPoolExecutor(len(trials)) as threads:
        futures: Sequence[Future[Run]] = [threads.submit(run, trial) for trial in trials]
        return [future.result(WAIT) for future in futures]


def measure_difference(one: Run, other: Run) -> float:
    """Return the largest difference of all metrics, estimates and tensors of two runs.

    Tensors are those of every checkpoint: adapters, moments of the optimizer, merged weights.
    """
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert one.outcome is not None
    assert other.outcome is not None
    largest = 0.0
    assert [m.step for m in one.reports] == [m.step for m in other.reports]
    for ours, theirs in zip(one.reports, other.reports, strict=True):
        assert ours.metrics.keys() == theirs.metrics.keys()
        pairs = [(value, theirs.metrics[name]) for name, value in ours.metrics.items()]
        largest = max(largest, *(abs(a - b) for a, b in pairs))
    for split in ("validation", "test"):
        ours, theirs = getattr(one.outcome, split), getattr(other.outcome, split)
        assert ours.keys() == theirs.keys()
        largest = max(largest, *(abs(ours[name].mean - theirs[name].mean) for name in ours))
    return max(largest, *_compare_checkpoints(one.config.directory, other.config.directory))


def _compare_checkpoints(one: Path, other: Path) -> list[float]:
    differences = list[float]()
    names = sorted(path.relative_to(one) for path in one.glob("checkpoint-*/**/*.safetensors"))
    assert names
    for name in names:
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        differences += [_subtract(tensor, theirs[key]) for key, tensor in ours.items()]
    states = sorted(path.relative_to(one) for path in one.glob(f"checkpoint-*/{OPTIMIZER_FILE}"))
    for name in states:
        ours, theirs = (list_tensors(torch.load(d / name)) for d in (one, other))
        differences += [_subtract(a, b) for a, b in zip(ours, theirs, strict=True)]
    return differences


def list_tensors(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested dictionaries and lists, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in list_tensors(item)]


def _subtract(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
