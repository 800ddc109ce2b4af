"""GPUs of a trial's process: its share of the memory, one engine start at a time, utilisation."""

from __future__ import annotations

import fcntl
import gc
import importlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gdpo_tune.core.errors import CrowdedGpuError
from gdpo_tune.core.files import lock_file
from gdpo_tune.core.gpu_memory import CONTEXT, GIB
from gdpo_tune.core.http import PATIENCE

_LOGGER = logging.getLogger("gdpo_tune.training")
FOREIGN = 2 * GIB
"""Bytes above which other processes on a whole GPU are the reason for its lack of memory; less may
be what CUDA and its libraries take for the trial itself."""
SEGMENT = 32 * 2**20
"""Bytes by which torch may enlarge a request at most: it takes a GPU's memory in segments."""


def limit_gpu_memory(share: float) -> None:
    """Limit what torch allocates on this process's GPU, a colocated engine included, to a share.

    A trial that grows too large then fails itself and not its neighbours.
    """
    if share < 1 and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT / total, 0.0))


def free_garbage() -> None:
    """Return the GPU memory of objects that are no longer used, such as an earlier trainer."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def lock_gpu() -> Generator[None]:
    """Wait until no other trial of this user starts an engine on this process's GPU.

    Each waits for free memory, and would take for free what another one is about to allocate.
    Without a GPU there is no lock, because nothing is measured.
    """
    if not torch.cuda.is_available():
        yield
        return
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    directory = Path(tempfile.gettempdir()) / f"gdpo-tune-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"gpu-{properties.uuid}.lock"
    with path.open("a") as file:
        lock_file(file.fileno(), fcntl.LOCK_EX, path)
        yield


def wait_for_memory(needed: float, patience: float = PATIENCE, pause: float = 1.0) -> None:
    """Wait until so many bytes of this process's GPU are free, such as after a neighbour's death.

    Raises:
        CrowdedGpuError: they are not free within `patience` seconds.
    """
    if not torch.cuda.is_available():
        return
    end, has_warned = time.monotonic() + patience, False
    while True:
        free, total = torch.cuda.mem_get_info()
        if free >= needed:
            return
        lack = (
            f"an engine needs {needed / GIB:.1f} GiB of the GPU, and {free / GIB:.1f} of "
            f"{total / GIB:.0f} GiB are free"
        )
        if time.monotonic() >= end:
            raise CrowdedGpuError(f"{lack} since {patience:g} s: other processes hold the rest")
        if not has_warned:
            _LOGGER.warning("%s: waiting for other processes to release memory", lack)
            has_warned = True
        time.sleep(pause)


def is_crowded(share: float, requested: int = 0) -> bool:
    """Return whether this process finds no memory on its GPU because of other processes.

    That is so if it holds less than its `share` of the GPU, the `requested` bytes included.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    if own + requested + SEGMENT > share * total - CONTEXT:
        return False
    return share < 1 or total - free - own > FOREIGN


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
