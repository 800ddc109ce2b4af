"""The most memory that something took while a block of code ran."""

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
    """Reads again and again, in a thread, while its `with` block runs."""

    def __init__(self, read: Callable[[], float]) -> None:
        """
        Args:
            read: gives what is in use now.
        """
        self.highest = 0.0
        """In the unit of what is read."""
        self._read = read
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        """Begin, with a first reading here, so that one that cannot be made fails at once."""
        self.highest = self._read()
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(self, *_) -> None:
        """End, and raise what a reading has raised."""
        self._over.set()
        self._threads.shutdown()
        self._watching.result()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.highest = max(self.highest, self._read())


def measure_gpu_memory() -> float:
    """MiB that all processes together take of the one GPU that may be used.

    Raises:
        subprocess.CalledProcessError: NVIDIA's tool finds no such GPU.
    """
    return float(query_gpu("memory.used"))


def query_gpu(what: str) -> str:
    """What NVIDIA's tool says of the one GPU that may be used."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    # The tool itself does not know of this variable.
    if device := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={device}")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return answer.stdout.strip()


def measure_process_memory() -> float:
    """MiB of this process and everything below it; shared pages count once a process."""
    own = psutil.Process()
    total = 0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20
