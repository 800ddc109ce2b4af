"""Memory and CPUs of this machine, and resources that must be closed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Self

SHARE_FOR_CANDIDATES = 0.5
"""Share of the memory for all candidates of one sandbox; the trainer needs the rest."""


class CloseableResource(ABC):
    """Base class of resources that are closed explicitly or by a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the resource holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def count_parallel_candidates(memory: int, bytes_each: int) -> int:
    """Return how many candidates may run side by side in so many bytes; at least one."""
    return max(1, int(SHARE_FOR_CANDIDATES * memory / bytes_each))


def read_machine_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the processes of this machine or control group share.

    This is the smallest of `MemTotal` and the limits of this process's control group and of its
    parents, version 2 or 1; swap does not count. None where the kernel reports none
    (not Linux). `root` contains `proc` and `sys`.
    """
    lines = map(str.split, _read_lines(root / "proc/meminfo"))
    totals = [int(words[1]) << 10 for words in lines if words[:1] == ["MemTotal:"]]
    limits = _read_group_files(root, "memory", "memory.max", "memory.limit_in_bytes")
    return min([*totals, *(int(words[0]) for words in limits if words[0] != "max")], default=None)


def count_local_cpus(root: Path = Path("/")) -> int:
    """Return the CPU cores that this process may use: its affinity, or less where a quota says so.

    A quota of this process's control group, or of a parent, counts in whole cores, as in Ray, and
    as one at least. `root` contains `proc` and `sys`.

    Source: `cpu.max` in the kernel's cgroup-v2.rst; `cpu.cfs_quota_us`, -1 for none, in its
    sched-bwc.rst.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    files = _read_group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us")
    quotas = [int(words[0]) // int(words[1]) for words in files if words[0].isdecimal()]
    return max(1, min([cores, *quotas]))


def _read_group_files(
    root: Path, controller: str, name: str, names_of_version_1: str
) -> Iterator[list[str]]:
    """Yield the words of files of this process's control group, then of each parent that has them.

    A container may see the path that its group has outside; then only the last of these files is
    there, and it is the container's own.
    """
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            names = names_of_version_1.split() if controllers else [name]
            lines = [line for name in names for line in _read_lines(mount / group / name)]
            if words := " ".join(lines).split():
                yield words


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # which of these files exist differs from machine to machine
