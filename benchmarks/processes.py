"""CPU time, memory and descriptors of this process and its descendants, read from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_VANISHED = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Process:
    """Some fields of one line of /proc/PID/stat."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    """CPU time of the process and of every child that it has waited for, to a clock tick."""


def list_processes(root: int) -> list[Process]:
    """Return the process `root` and all of its descendants, zombies included."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(*_VANISHED):
            fields = entry.read_text().rpartition(")")[2].split()
            pid, ticks = int(entry.parent.name), sum(map(int, fields[11:15]))
            table[pid] = Process(pid, int(fields[1]), fields[0], ticks * _TICK)
    members = {root}
    while more := {p.pid for p in table.values() if p.parent in members} - members:
        members |= more
    return [table[pid] for pid in sorted(members) if pid in table]


def measure_cpu_seconds() -> float:
    """Return the CPU time of this process and all of its descendants, ended ones included."""
    return sum(process.cpu_seconds for process in list_processes(os.getpid()))


def measure_memory(pid: int) -> dict[str, float]:
    """Return the resident memory of a process, and its PSS where that may be read, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {"rss": _read_kib(status, "VmRSS:") / 1024}
    with contextlib.suppress(*_VANISHED):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes["pss"] = _read_kib(rollup, "Pss:") / 1024
    return sizes


def _read_kib(text: str, key: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)


def count_open_descriptors(pid: int) -> int | None:
    """Count the open descriptors: 0 if the process has ended, None without permission."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return 0
