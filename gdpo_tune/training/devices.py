"""Devices that a trial's process computes with: what they are, and how busy its GPUs are."""

from __future__ import annotations

import importlib
import socket
import statistics
from functools import cache
from typing import Any

import torch

from gdpo_tune.core.engines import list_versions
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.gpu_memory import GIB
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import DEVICE, VERSIONS
from gdpo_tune.training.trl_arguments import uses_bfloat16


def require_gpu() -> None:
    """Raise `ResourcesError` where CUDA cannot use the GPU that a trial was given.

    It would train on the CPU, a hundred times slower, and sample with another engine.
    """
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        reason = "no GPU is visible"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
    raise ResourcesError(
        f"resources.gpus: torch {torch.__version__} cannot use a GPU on {socket.gethostname()} "
        f"({reason})\n"
        "    fix: a driver for this build of torch, or a build for this driver (docs/gpus.md), or "
        "--set resources.gpus=0"
    )


def describe_device(config: TrialConfig) -> dict[str, str]:
    """Return what a trial in this process computes with, for its record."""
    device = "CPU"
    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    device += ", bfloat16" if uses_bfloat16(config) else ", float32"
    versions = ", ".join(f"{name} {version}" for name, version in list_versions().items())
    return {DEVICE: device, VERSIONS: versions}


def read_gpu_metrics() -> dict[str, float]:
    """Read utilisation and memory of this process's GPUs, other trials on them included.

    Returns:
        `train/gpu_peak_gib`, most that this process has taken of its GPU so far, CUDA's context
        aside: the first step tells what a trial needs. With NVIDIA's library, and not of a slice of
        a GPU, also `train/gpu_utilisation`, share of the last moments in which the GPU worked (0 to
        1, mean over GPUs), and `train/gpu_memory_gib`, memory in use of the fullest GPU. Empty
        without a GPU.
    """
    gpus = list_gpus()
    if not gpus:
        return {}
    metrics = {"train/gpu_peak_gib": torch.cuda.max_memory_reserved() / GIB}
    library = load_nvml()
    if library is None:
        return metrics
    try:
        handles = [library.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
        busy = [library.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        used = [library.nvmlDeviceGetMemoryInfo(handle).used / GIB for handle in handles]
    except library.NVMLError:
        return metrics
    busiest = {"train/gpu_utilisation": statistics.fmean(busy), "train/gpu_memory_gib": max(used)}
    return metrics | busiest


def list_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process uses, as NVIDIA's library writes them."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"GPU-{device.uuid}" for device in devices]


@cache
def load_nvml() -> Any:
    """Return NVIDIA's library, initialised; None if it is not installed or finds no driver."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library
