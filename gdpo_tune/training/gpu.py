"""GPUs of a trial's process: its share of the memory, one engine start at a time, utilisation."""

from __future__ import annotations

import fcntl
import importlib
import os
import statistics
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
CONTEXT = GIB // 2
"""Bytes of a GPU that CUDA takes for a process beside what torch allocates and can limit."""


def limit_gpu_memory(share: float) -> None:
    """Limit what torch allocates on this process's GPU, a colocated engine included, to a share.

    A trial that grows too large then fails itself and not its neighbours.
    """
    if share < 1 and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT / total, 0.0))


@contextmanager
def lock_gpu() -> Generator[None]:
    """Wait until no other trial of this user starts an engine on this process's GPU.

    An engine measures free memory while it starts, and would count what another one takes meanwhile
    as its own. Without a GPU there is no lock, because nothing is measured.
    """
    if not torch.cuda.is_available():
        yield
        return
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    directory = Path(tempfile.gettempdir()) / f"gdpo-tune-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    with (directory / f"gpu-{properties.uuid}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it when the file is closed
        yield


def read_gpu_metrics() -> dict[str, float]:
    """Read utilisation and memory of this process's GPUs, other trials on them included.

    Returns:
        `train/gpu_utilisation`, share of the last moments in which the GPU worked (0 to 1, mean
        over GPUs), and `train/gpu_memory_gib`, memory in use (of the fullest GPU). Empty without a
        GPU, without NVIDIA's library, or if it gives no answer, as for a slice of a GPU.
    """
    gpus = list_gpus()
    library = load_nvml() if gpus else None
    if library is None:
        return {}
    try:
        handles = [library.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
        busy = [library.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        used = [library.nvmlDeviceGetMemoryInfo(handle).used / GIB for handle in handles]
    except library.NVMLError:
        return {}
    return {"train/gpu_utilisation": statistics.fmean(busy), "train/gpu_memory_gib": max(used)}


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
