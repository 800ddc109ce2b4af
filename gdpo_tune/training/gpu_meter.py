"""What the GPUs of a trial's process are doing, by NVIDIA's own library; nothing without either."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

GIB = 2**30


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process uses, under the names that NVIDIA's library has."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"GPU-{device.uuid}" for device in devices]


@cache
def nvml() -> Any:
    """NVIDIA's library, ready for questions; None where it is not installed, or finds no driver."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


class GpuMeter:
    """Reads utilisation and memory. They are those of the device, other trials on it included."""

    def __init__(
        self,
        gpus: Callable[[], Sequence[str]] = visible_gpus,
        library: Callable[[], Any] = nvml,
    ) -> None:
        self._gpus = gpus
        self._library = library

    def read(self) -> dict[str, float]:
        """`train/gpu_utilisation`, the share of the last moments in which the GPU worked (0 to 1;
        a mean over several), and `train/gpu_memory_gib`, what is taken (of the fullest); empty if
        they cannot be had."""
        gpus = self._gpus()
        library = self._library() if gpus else None
        if library is None:
            return {}
        try:
            handles = [library.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
            busy = [library.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
            taken = [library.nvmlDeviceGetMemoryInfo(handle).used / GIB for handle in handles]
        except library.NVMLError:  # a slice of a GPU tells no utilisation
            return {}
        return {
            "train/gpu_utilisation": statistics.fmean(busy),
            "train/gpu_memory_gib": max(taken),
        }
