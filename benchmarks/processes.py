"""What the processes below this one use, read from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_VANISHED = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat: the fields that are wanted here."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    """Of the process and of every child that it has waited for, to a clock tick."""


def list_processes(root: int) -> list[Process]:
    """The process `root` and all of its descendants, zombies included."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(*_VANISHED):
            fields = entry.read_text().rpartition(")")[2].split()
            pid, ticks = int(entry.parent.name), sum(map(int, fields[11:15]))
            table[pid] = Process(pid, int(fields[1]), fields[0], ticks * _TICK)
    found = {root}
    while more := {p.pid for p in table.values() if p.parent in found} - found:
        found |= more
    return [table[pid] for pid in sorted(found) if pid in table]


def measure_cpu_seconds() -> float:
    """CPU time of this process and everything below it, whether it still lives or not."""
    return sum(process.cpu_seconds for process in list_processes(os.getpid()))


def measure_memory(pid: int) -> dict[str, float]:
    """Resident memory of a process, and its proportional share (PSS) where that may be read."""
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {"rss": _read_kib(status, "VmRSS:") / 1024}
    with contextlib.suppress(*_VANISHED):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes["pss"] = _read_kib(rollup, "Pss:") / 1024
    return sizes


def _read_kib(text: str, key: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)


def count_open_descriptors(pid: int) -> int | None:
    """How many descriptors a process has open, 0 if it has ended; None where nobody may ask."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return 0
