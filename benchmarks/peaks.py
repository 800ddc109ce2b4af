"""Peak memory while a block of code runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import psutil

EVERY = 0.5
"""Seconds between two readings."""


class Peak:
    """Highest of the readings that a thread takes while the `with` block runs."""

    def __init__(self, read: Callable[[], float]) -> None:
        """Create a peak.

        Args:
            read: returns the current use.
        """
        self.highest = 0.0
        """Highest reading, in the unit of `read`."""
        self._read = read
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        """Start the thread after a first reading, so that a reading that fails does so at once."""
        self.highest = self._read()
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(self, *_) -> None:
        """Stop the thread; raise the error of a reading, if there was one."""
        self._over.set()
        self._threads.shutdown()
        self._watching.result()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.highest = max(self.highest, self._read())


def measure_gpu_memory() -> float:
    """Return the MiB that all processes together use of the one visible GPU.

    Raises:
        subprocess.CalledProcessError: `nvidia-smi` finds no such GPU.
    """
    return float(query_gpu("memory.used"))


def query_gpu(field: str) -> str:
    """Return a field that `nvidia-smi` reports of the one visible GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    # `nvidia-smi` itself ignores this variable.
    if device := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={device}")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return answer.stdout.strip()


def measure_process_memory() -> float:
    """Return the MiB of this process and its descendants; shared pages count once for each."""
    own = psutil.Process()
    total = 0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20
