"""A `train()` without training: instant, deterministic, with faults on request.

`faults.json` in the sweep's directory maps a trial's number to its fault. `log.jsonl` there lists
the start of each process with its step, and each checkpoint. Trials import this module by name, so
its directory is on PYTHONPATH. With an object store, nodes share no directory: both files are then
in the directory that the variable `FAKE_SWEEP` names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import ray

from gdpo_tune.core.errors import NonFiniteError, SandboxUnavailable
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, Report
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray import attempt

GATE = "go"
"""File in the sweep's directory that opens the gate."""
SHARED_DIRECTORY = os.environ.get("FAKE_SWEEP", "")
SECONDS = 0.05
"""Duration that a trial reports."""
VALUES = ("correctness", "format", "length")
"""Metrics of a policy."""
BUMP = 0.02
"""Gain of a merge above the mean of its parts."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Simulate the configured steps, with a checkpoint at each; a merge has its own values."""
    if config.parts:
        return evaluate_parts(config, resume, report)
    sweep = find_sweep_directory(config)
    fault = read_fault(config)
    attempts = len(list_executions(sweep, config.directory.name))
    resumed = read_checkpoint(resume) if resume else None
    start = resumed.step if resumed else 0
    append_log_entry(config, {"from": start, **describe_node()})
    if resumed:
        report(Measurement(start, {}, resumed.cost, resumed.validation), resume)
    checkpoint = resume
    if fault == "grow":
        attempt.MEMORY_SHARE = 0.0  # this process is too large for a second trial
    for step in range(start + 1, config.training.steps + 1):
        if fault == "slow":
            time.sleep(0.3)
        if fault == "gate":
            time.sleep(0.1)
            if step == 3:
                wait_for_gate(sweep)
        if fault == "nonfinite":
            raise NonFiniteError(f"loss is nan at step {step}")
        if fault == "memory":
            allocate_too_much(config)
        if fault == "sandbox":
            raise SandboxUnavailable("no isolation here")
        if fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == "raise" or (fault == "raise once" and step == 2 and not attempts):
            raise RuntimeError(f"broken at step {step}")
        if fault == "die at gate" and step == 2 and not attempts:
            wait_for_gate(sweep)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "die" or (fault == "die once" and step == 2 and not attempts):
            os.kill(os.getpid(), signal.SIGKILL)
        cost = Cost(step * config.training.completions_per_step, SECONDS)
        measurement = build_measurement(config, step, cost)
        checkpoint = write_checkpoint(
            config.directory,
            step,
            cost,
            lambda directory: write_values(directory, compute_values(config)),
            measurement.validation,
        ).path
        if not SHARED_DIRECTORY:
            append_log_entry(config, {"checkpoint": step})
        report(measurement, checkpoint)
        if SHARED_DIRECTORY:  # only then others can know of it
            append_log_entry(config, {"checkpoint": step})
    estimates = {name: Estimate(value, 0.01) for name, value in compute_values(config).items()}
    cost = Cost(config.training.steps * config.training.completions_per_step, SECONDS)
    return Outcome(estimates, estimates, cost, checkpoint, {"process": str(os.getpid())})


def evaluate_parts(config: TrialConfig, resume: Path | None, report: Report) -> Outcome:
    """Simulate the evaluation of a merge: the mean of its parts, and a little more."""
    append_log_entry(config, {"from": 0, **describe_node()})
    config.directory.mkdir(parents=True, exist_ok=True)
    values = dict.fromkeys(VALUES, BUMP if len(config.parts) > 1 else 0.0)
    for part in config.parts:
        own = json.loads((part.checkpoint / "weights").read_text())
        values = {name: value + part.weight * own[name] for name, value in values.items()}
    estimates = {name: Estimate(value, 0.01) for name, value in values.items()}
    cost = Cost(0, SECONDS, evaluation_completions=1)
    report(Measurement(0, {}, cost, estimates), resume)
    checkpoint = write_checkpoint(config.directory, 0, cost, lambda d: write_values(d, values)).path
    if not SHARED_DIRECTORY:
        append_log_entry(config, {"checkpoint": 0})
    return Outcome(estimates, estimates, cost, checkpoint, {"process": str(os.getpid())})


def write_values(directory: Path, values: dict[str, float]) -> None:
    """Write the values of a policy in place of its weights."""
    (directory / "weights").write_text(json.dumps(values))


def find_sweep_directory(config: TrialConfig) -> Path:
    return Path(SHARED_DIRECTORY) if SHARED_DIRECTORY else config.directory.parent.parent


def wait_for_gate(sweep: Path) -> None:
    while not (sweep / GATE).exists():
        time.sleep(0.05)


def describe_node() -> dict[str, str]:
    """Return the id of this node and the visible GPUs."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"node": ray.get_runtime_context().get_node_id(), "gpus": gpus}


def append_log_entry(config: TrialConfig, entry: dict[str, object]) -> None:
    """Append an entry with trial, process and time to the log of the sweep."""
    common = {"trial": config.directory.name, "pid": os.getpid(), "time": time.time()}
    with (find_sweep_directory(config) / "log.jsonl").open("a") as log:
        log.write(json.dumps({**common, **entry}) + "\n")


def build_measurement(config: TrialConfig, step: int, cost: Cost) -> Measurement:
    estimates = {name: Estimate(value, 0.01) for name, value in compute_values(config).items()}
    flat = {f"validation/{name}": estimate.mean for name, estimate in estimates.items()}
    return Measurement(step, flat, cost, estimates)


def allocate_too_much(config: TrialConfig) -> None:
    """Raise an out-of-memory error inside the guard of the trainer."""
    import torch

    from gdpo_tune.training.memory import explain_out_of_memory

    with explain_out_of_memory(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def compute_values(config: TrialConfig) -> dict[str, float]:
    """Compute objectives that trade off over the weight of `format`, with noise from the seed.

    A larger learning rate is better in all.
    """
    weight = float(config.params["reward_weights.format"])
    noise = (config.seed % 1000) / 1e5
    quality = 0.7 + 1000 * float(config.params["learning_rate"])
    correctness = quality / (1 + weight) + noise
    return {"correctness": correctness, "format": quality * weight / (1 + weight), "length": 0.5}


def read_fault(config: TrialConfig) -> str:
    """Return the fault of this trial; empty without one."""
    path = find_sweep_directory(config) / "faults.json"
    faults = json.loads(path.read_text()) if path.exists() else {}
    return faults.get(config.directory.name, faults.get("all", ""))


def list_executions(sweep: Path, trial: str | None = None) -> list[dict[str, object]]:
    path = sweep / "log.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [e for e in entries if "from" in e and trial in (None, e["trial"])]


WATCHED = ("HF_TOKEN", "HF_HOME", "NCCL_DEBUG")
VARIABLES = "variables.json"


def digest(value: str) -> str:
    """A value cannot be found in a file that has this."""
    return hashlib.sha256(value.encode()).hexdigest()


def train_and_note_variables(
    config: TrialConfig, *, resume: Path | None, report: Report
) -> Outcome:
    config.directory.mkdir(parents=True, exist_ok=True)
    present = {name: digest(os.environ[name]) for name in WATCHED if name in os.environ}
    (config.directory / VARIABLES).write_text(json.dumps(present))
    return train(config, resume=resume, report=report)
