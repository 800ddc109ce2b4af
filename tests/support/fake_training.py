"""A `train()` without training: instant, deterministic, and it misbehaves on request.

`faults.json` in the sweep's folder maps a trial's number to what it does; `log.jsonl` there tells
which process began at which step, and where checkpoints were written. Trials import this module by
name, so its folder is on PYTHONPATH. Of a sweep on an object store nodes have no folder in common:
both files are then where the variable `FAKE_SWEEP` says.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import ray

from gdpo_tune.core.errors import NonFiniteError, SandboxUnavailable
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, Report, TrialConfig
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray import trainable

GATE = "go"
"""File of the sweep's folder that opens the gate."""
STORED = os.environ.get("FAKE_SWEEP", "")
SECONDS = 0.05
"""What a trial says it took."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Train nothing, in as many steps as asked, with a checkpoint at each."""
    sweep = find_sweep(config)
    fault = read_fault(config)
    attempts = len(list_executions(sweep, config.directory.name))
    known = read_checkpoint(resume) if resume else None
    start = known.step if known else 0
    note(config, {"from": start, **describe_place()})
    if known:
        report(Measurement(start, {}, known.cost, known.validation), resume)
    checkpoint = resume
    if fault == "grow":
        trainable.MEMORY_SHARE = 0.0  # this process is too large for a second trial
    for step in range(start + 1, config.training.steps + 1):
        if fault == "slow":
            time.sleep(0.3)
        if fault == "gate":
            wait_at_gate(sweep, step)
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
        if fault == "die" or (fault == "die once" and step == 2 and not attempts):
            os.kill(os.getpid(), signal.SIGKILL)
        cost = Cost(step * config.training.completions_per_step, SECONDS)
        found = build_measurement(config, step, cost)
        checkpoint = write_checkpoint(
            config.directory,
            step,
            cost,
            lambda folder: (folder / "weights").touch(),
            found.validation,
        ).path
        if not STORED:
            note(config, {"checkpoint": step})
        report(found, checkpoint)
        if STORED:  # only then others can know of it
            note(config, {"checkpoint": step})
    estimates = {name: Estimate(value, 0.01) for name, value in compute_values(config).items()}
    cost = Cost(config.training.steps * config.training.completions_per_step, SECONDS)
    return Outcome(estimates, estimates, cost, checkpoint, {"process": str(os.getpid())})


def find_sweep(config: TrialConfig) -> Path:
    """The folder of the log and of the faults."""
    return Path(STORED) if STORED else config.directory.parent.parent


def wait_at_gate(sweep: Path, step: int) -> None:
    """Let nobody past the second checkpoint before the gate is open, and nobody hurry then."""
    while step == 3 and not (sweep / GATE).exists():
        time.sleep(0.05)
    time.sleep(0.1)


def describe_place() -> dict[str, str]:
    """On which node of a cluster this is, and which GPUs of it."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"node": ray.get_runtime_context().get_node_id(), "gpus": gpus}


def note(config: TrialConfig, entry: dict[str, object]) -> None:
    """Add a line to the log of the sweep: who, when, what."""
    known = {"trial": config.directory.name, "pid": os.getpid(), "time": time.time()}
    with (find_sweep(config) / "log.jsonl").open("a") as log:
        log.write(json.dumps({**known, **entry}) + "\n")


def build_measurement(config: TrialConfig, step: int, cost: Cost) -> Measurement:
    """What an evaluation after each step finds."""
    found = {name: Estimate(value, 0.01) for name, value in compute_values(config).items()}
    flat = {f"validation/{name}": estimate.mean for name, estimate in found.items()}
    return Measurement(step, flat, cost, found)


def allocate_too_much(config: TrialConfig) -> None:
    """What a trial does whose tensors do not fit, inside of what guards all of its work."""
    import torch

    from gdpo_tune.training.out_of_memory import explain_out_of_memory

    with explain_out_of_memory(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def compute_values(config: TrialConfig) -> dict[str, float]:
    """Objectives that trade off over the weight of `format`, with a little noise of the seed.

    A larger learning rate is better in all.
    """
    weight = float(config.params["reward_weights.format"])
    noise = (config.seed % 1000) / 1e5
    quality = 0.7 + 1000 * float(config.params["learning_rate"])
    correctness = quality / (1 + weight) + noise
    return {"correctness": correctness, "format": quality * weight / (1 + weight), "length": 0.5}


def read_fault(config: TrialConfig) -> str:
    """What this trial is to do wrong."""
    path = find_sweep(config) / "faults.json"
    faults = json.loads(path.read_text()) if path.exists() else {}
    return faults.get(config.directory.name, faults.get("all", ""))


def list_executions(sweep: Path, trial: str | None = None) -> list[dict[str, object]]:
    """Which starts of `train` the log holds, of one trial or of all."""
    path = sweep / "log.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [e for e in entries if "from" in e and trial in (None, e["trial"])]
