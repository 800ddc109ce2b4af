"""Memory of this machine, and resources that must be closed."""

from __future__ import annotations

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
    return min([*totals, *_read_group_limits(root)], default=None)


def _read_group_limits(root: Path) -> Iterator[int]:
    groups = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _read_limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _read_limits(groups / "memory", path, "memory.limit_in_bytes")


def _read_limits(mount: Path, path: str, name: str) -> Iterator[int]:
    """Yield the limits of a group and of its parents.

    A container may see the path that its group has outside; then only the last of these files is
    there, and it is the container's own.
    """
    inner = PurePosixPath(path.lstrip("/"))
    for group in (inner, *inner.parents):
        for line in _read_lines(mount / group / name):
            if line != "max":
                yield int(line)


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # which of these files exist differs from machine to machine
