"""Processes by pid and time of creation, which tells a pid that was given out again."""

from __future__ import annotations

import psutil

SAME_START = 2.0
"""Seconds within which two times of creation are one process's: they are read off the boot time,
which moves when the clock is set."""


def creation(process: psutil.Process) -> float | None:
    """When a process was created, in Unix seconds; None if it is gone or not ours to look at."""
    try:
        return process.create_time()
    except psutil.Error:
        return None


def process_of(pid: int, created: float) -> psutil.Process | None:
    """The process of that pid and time; None if it is gone or not ours to look at."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < SAME_START else None
    except psutil.Error:
        return None


def runs(pid: int, created: float) -> bool:
    """Whether a process is there, and more of it than its exit status."""
    process = process_of(pid, created)
    try:
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
