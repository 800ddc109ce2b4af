"""How many trials fit side by side, and whether one fits at all."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gdpo_tune.errors import ResourcesError
from gdpo_tune.spec import Resources, SweepSpec

SLACK = 1e-9
"""Keeps 1 / 0.1 at 10 slots."""


def local_cpus() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_local(spec: SweepSpec) -> None:
    """Refuse at once what this machine cannot hold; nothing is started to find out.

    Raises:
        ResourcesError: more CPUs or GPUs a trial than the machine has.
    """
    wanted = spec.resources
    if wanted.cpus > local_cpus():
        raise ResourcesError(
            f"a trial wants {wanted.cpus:g} CPUs and this machine has {local_cpus()}; "
            "lower resources.cpus"
        )
    if wanted.gpus > 0 and not has_gpu():
        raise ResourcesError(
            f"a trial wants {wanted.gpus:g} GPUs and this machine has none; set resources.gpus to "
            "0, or RAY_ADDRESS to a cluster that has them"
        )


def has_gpu() -> bool:
    """Whether the kernel knows a GPU (NVIDIA's or AMD's driver is loaded)."""
    return Path("/proc/driver/nvidia/gpus").exists() or Path("/dev/kfd").exists()


def slots(resources: Resources, nodes: Sequence[Mapping[str, float]]) -> int:
    """Trials that run side by side on nodes with these `CPU` and `GPU` amounts.

    Raises:
        ResourcesError: no node can hold a single trial.
    """
    total = 0
    for node in nodes:
        fits = node.get("CPU", 0.0) / resources.cpus
        if resources.gpus > 0:
            fits = min(fits, node.get("GPU", 0.0) / resources.gpus)
        total += math.floor(fits + SLACK)
    if total == 0:
        raise ResourcesError(
            f"a trial wants {resources.cpus:g} CPUs and {resources.gpus:g} GPUs, which no node has "
            f"({len(nodes)} node{'s' if len(nodes) != 1 else ''} alive)"
        )
    return total
