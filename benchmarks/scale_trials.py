"""Results of the simulated trials of `scale.py`, thinned as the product thins them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from driver import compute_worth
from scale_executor import CLOCK

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import STEPS_FILE
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    Finished,
    Interrupted,
    pack,
    unpack_attempt,
)
from gdpo_tune.tuning.ray.reporter import Reporter

METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    *(
        f"rewards/{reward}/{kind}"
        for reward in ("correctness", "format", "length")
        for kind in ("share", "mean", "frac_reward_zero_std", "std")
    ),
)
"""Names of the metrics of a step of the shipped sweep, without `train/`."""


@cache
def build_step(step: int) -> tuple[dict[str, float], bytes]:
    """Build the metrics of a step, equal in all trials, and its line in the trial's file."""
    numbers = np.random.default_rng(step).random(len(METRICS)).tolist()
    metrics = {f"train/{name}": number for name, number in zip(METRICS, numbers, strict=True)}
    cost = {"completions": 64 * step, "seconds": float(step), "cpu_seconds": float(step)}
    line = json.dumps({"step": step, "metrics": metrics, "cost": cost})
    return metrics, line.encode() + b"\n"


def append_lines(trial: TrialConfig, lines: list[bytes]) -> None:
    """Append `lines` to the trial's file, as `append_step` does line by line, and clear them."""
    trial.directory.mkdir(parents=True, exist_ok=True)
    with (trial.directory / STEPS_FILE).open("ab") as file:
        file.write(b"".join(lines))
    lines.clear()


class Simulated(Reporter):
    """The product's reporter with the clock of the simulation."""

    def __init__(self, attempt: AttemptConfig) -> None:
        super().__init__(attempt)
        self.seconds = 0.0
        """Seconds of training since the last result."""

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return CLOCK.now + self.seconds


def simulate_results(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of a trial's process, one for each `train` call of Ray Tune."""
    attempt = unpack_attempt(config)
    trial = attempt.trial
    rng = np.random.default_rng(trial.seed)
    values, steps = compute_worth(trial), trial.training.steps
    config = pack(attempt)
    estimates: dict[str, Estimate] = {}
    cost = Cost()
    reporter, written = Simulated(attempt), []
    for step in range(1, steps + 1) if trial.train else ():
        validated = step == steps or step in trial.evaluate_at
        metrics, line = build_step(step)
        written.append(line)
        cost = Cost(step * trial.training.completions_per_step, float(step), float(step))
        if validated:
            share = (step / steps) ** 0.5
            noise = (0.02 * rng.standard_normal(len(values))).tolist()
            estimates = {
                name: Estimate(value * share + error, 0.02)
                for (name, value), error in zip(values.items(), noise, strict=True)
            }
            metrics = metrics | {
                f"validation/{name}": estimate.mean for name, estimate in estimates.items()
            }
        measurement = Measurement(step, metrics, cost, estimates if validated else {})
        reporter.seconds += 1.0
        stop, due = reporter.decide(measurement)
        if not due:
            reporter.store_pending(measurement)
            continue
        append_lines(trial, written)
        result = add_ray_fields(pack(reporter.build_update(measurement)), step, config)
        yield result | {"time_this_iter_s": reporter.seconds}
        reporter.seconds = 0.0
        if stop or (validated and reporter.is_halted()):
            yield add_ray_fields(pack(Interrupted()), 0, config)
            yield {"__duplicate__": True}
            return
    estimates = estimates or {name: Estimate(0.1, 0.02) for name in values}
    yield add_ray_fields(pack(Finished(Outcome(estimates, estimates, cost, None))), 0, config)
    yield {"__duplicate__": True}


def generate_flat_results(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of a trial of Ray Tune alone, as flat metrics."""
    numbers = {f"train/{name}": 0.5 for name in METRICS}
    for step in range(1, config["results"] + 1):
        yield add_ray_fields(dict(numbers), step, {"results": config["results"]})
    yield {"__duplicate__": True}


def add_ray_fields(result: dict[str, Any], step: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the fields of Ray's `Trainable.train`; step 0 takes no time."""
    added = {
        "done": False,
        "date": "2026-01-01_00-00-00",
        "timestamp": 1767225600,
        "time_this_iter_s": 1.0,
        "time_total_s": float(step),
        "pid": 1,
        "hostname": "node",
        "node_ip": "10.0.0.1",
        "config": config,
        "time_since_restore": float(step),
        "iterations_since_restore": step,
    }
    return result | added | ({"training_iteration": step} if step else {})
