"""A `train()` without training: instant, deterministic, and it fails on request."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from gdpo_tune.errors import NonFiniteError
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.trials import Cost, Estimate, Measurement, Outcome, Report, TrialConfig


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Two objectives that trade off over the weight of `format`."""
    weight = float(config.params["reward_weights.format"])
    rate = float(config.params["learning_rate"])
    noise = (config.seed % 1000) / 1e5
    correctness = 1 / (1 + weight) - abs(math.log10(rate / 1e-4)) / 10 + noise
    metrics = {"correctness": correctness, "format": weight / (1 + weight), "length": 0.5 + noise}
    cost = Cost(completions=config.training.steps * config.training.completions_per_step, seconds=0.01)
    report(
        Measurement(config.training.steps, {f"validation/{k}": v for k, v in metrics.items()}, cost),
        None,
    )
    estimates = {name: Estimate(value, 0.01) for name, value in metrics.items()}
    return Outcome(estimates, estimates, cost, None, {"process": str(os.getpid())})
