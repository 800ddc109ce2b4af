"""What the local machine has, asked without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from gdpo_tune.core.engines import choose, installed_vllm
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.spec.model import Resources, SweepSpec
from gdpo_tune.spec.sandbox_checks import lacking_memory

DEVICES = Path("/dev")
DEVICE = re.compile(r"nvidia\d+")


def check_resources(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ, devices: Path = DEVICES
) -> None:
    """Refuse a trial that cannot be placed on this machine, or whose code could never run there.

    A cluster's address in `RAY_ADDRESS` skips this: there the cluster says what it has.

    Args:
        spec: the sweep.
        environment: environment variables.
        devices: folder of device files.

    Raises:
        ResourcesError: a trial asks for more CPUs, GPUs or memory than there are.
        EngineError: trials are to sample with vLLM, which cannot be done here.
    """
    if environment.get("RAY_ADDRESS"):
        return
    gpus, cpus = visible_gpus(environment, devices), local_cpus()
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
    fit = fitting_workers(asked, cpus, gpus)
    if asked.workers > fit:
        raise ResourcesError(
            f"resources.workers = {asked.workers}: each takes {asked.cpus:g} CPUs and "
            f"{asked.gpus:g} GPUs, and this machine has {cpus} and {gpus}\n"
            f"    fix: --set resources.workers={fit}, {remedy}"
        )
    choose(spec.rollout, gpu=asked.gpus > 0, lean=False, vllm=installed_vllm())
    for reason in lacking_memory(spec, environment):
        raise ResourcesError(f"{reason}, {remedy}")


def fitting_workers(asked: Resources, cpus: int, gpus: int) -> int:
    """Workers that fit beside each other; 1 where one alone fits."""
    by_cpu = int(cpus / asked.cpus + 1e-9)
    return min(by_cpu, int(gpus / asked.gpus)) if asked.gpus else by_cpu


def local_cpus() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


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
