"""What the local machine has, asked without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from gdpo_tune.errors import ResourcesError
from gdpo_tune.spec.model import SweepSpec

DEVICES = Path("/dev")
DEVICE = re.compile(r"nvidia\d+")


def check_resources(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ, devices: Path = DEVICES
) -> None:
    """Refuse a trial that cannot be placed on this machine.

    A cluster's address in `RAY_ADDRESS` skips this: there the cluster says what it has.

    Args:
        spec: the sweep.
        environment: environment variables.
        devices: folder of device files.

    Raises:
        ResourcesError: a trial asks for more CPUs or GPUs than there are.
    """
    if environment.get("RAY_ADDRESS"):
        return
    gpus, cpus = visible_gpus(environment, devices), len(os.sched_getaffinity(0))
    asked = spec.resources
    remedy = "or set RAY_ADDRESS to a cluster that has them"
    if asked.gpus > gpus:
        raise ResourcesError(
            f"resources.gpus = {asked.gpus:g}: this machine has {gpus} GPUs that may be used\n"
            f"    fix: --set resources.gpus={gpus}, {remedy}"
        )
    if asked.cpus > cpus:
        raise ResourcesError(
            f"resources.cpus = {asked.cpus:g}: this machine has {cpus} CPUs\n"
            f"    fix: --set resources.cpus={cpus}, {remedy}"
        )


def visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> int:
    """GPUs that a process started here may use.

    `CUDA_VISIBLE_DEVICES` can only hide devices: naming one that does not exist gives nothing.
    """
    present = present_gpus(devices)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    named = 0
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):
            break  # CUDA stops reading at the first invalid entry
        named += 1
    return min(named, present)


def present_gpus(devices: Path) -> int:
    """GPUs by their device files: NVIDIA's, AMD's, or the one that Windows lends to Linux."""
    nvidia = sum(1 for file in devices.glob("nvidia*") if DEVICE.fullmatch(file.name))
    if nvidia:
        return nvidia
    if (devices / "kfd").exists():
        return sum(1 for _ in devices.glob("dri/renderD*"))
    return int((devices / "dxg").exists())
