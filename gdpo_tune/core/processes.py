"""Processes by pid and start, which tells a process from a later one with its pid.

A clock that is set moves the creation time in Unix seconds, but neither the start in ticks since
boot (field 22 of proc_pid_stat(5)) nor the id of the boot.
"""

from __future__ import annotations

from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_START = 2.0
"""Largest difference in seconds between two creation times of one process, where there is no /proc
or an earlier version has recorded the time: they follow a clock that may be set."""


def identify_start(pid: int) -> str:
    """Return boot and start tick of a process; without /proc its creation time in Unix seconds.

    Empty if it is gone or not accessible.
    """
    try:
        boot, stat = BOOT_ID.read_text().strip(), Path(f"/proc/{pid}/stat").read_bytes()
        return f"{boot}.{int(stat.rpartition(b')')[2].split()[19])}"  # a name may hold blanks
    except OSError:
        try:
            return f"{psutil.Process(pid).create_time():.2f}"
        except psutil.Error:
            return ""


def find_process(pid: int, start: str | float) -> psutil.Process | None:
    """Return the process with this pid and start; None if it is gone, a zombie or not accessible.

    `start` is from `identify_start`, or a creation time in Unix seconds.
    """
    try:
        process = psutil.Process(pid)
        is_same = bool(start) and identify_start(pid) == start
        is_same = is_same or abs(process.create_time() - float(start)) < SAME_START
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError):  # ValueError: the start of another process
        return None
