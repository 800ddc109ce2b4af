"""Processes by pid and creation time, which tells a process from a later one with its pid."""

from __future__ import annotations

import psutil

SAME_START = 2.0
"""Largest difference in seconds between two creation times of one process: they are derived from
the boot time, which moves when the clock is set."""


def read_creation_time(process: psutil.Process) -> float | None:
    """Return when a process was created, in Unix seconds; None if it is gone or not accessible."""
    try:
        return process.create_time()
    except psutil.Error:
        return None


def find_process(pid: int, created: float) -> psutil.Process | None:
    """Return the process with this pid and creation time; None if it is gone or not accessible."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < SAME_START else None
    except psutil.Error:
        return None


def is_running(pid: int, created: float) -> bool:
    """Return whether a process exists and is not a zombie."""
    process = find_process(pid, created)
    try:
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
