"""Sweeps whose trials, two on each logical GPU, wait at a gate beyond a checkpoint."""

from __future__ import annotations

import subprocess
from collections import Counter

from tests.support.fake_training import GATE
from tests.support.killed_sweeps import KilledSweep, wait_for_condition

GATED = (
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "search.replicates={per_point: 1, max_runs: 1}",
    "training.steps=6",
    "resources={cpus: 1, gpus: 0.5}",
)


def close_gate(sweep: KilledSweep) -> None:
    """Let no trial past its second checkpoint."""
    sweep.set_faults({"all": "gate"})


def open_gate(sweep: KilledSweep) -> None:
    """Let all trials pass the gate."""
    (sweep.fake_directory / GATE).touch()


def wait_at_gate(sweep: KilledSweep, process: subprocess.Popen[bytes], slots: int) -> None:

    def all_wait() -> bool:
        return sum(entry.get("checkpoint") == 2 for entry in sweep.read_log()) == slots

    wait_for_condition(process, all_wait, sweep.read_errors)
    trials_by_gpu = Counter((entry["node"], entry["gpus"]) for entry in sweep.list_starts())
    assert sorted(trials_by_gpu.values()) == [2] * (slots // 2), trials_by_gpu
