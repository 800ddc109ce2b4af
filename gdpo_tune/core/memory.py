"""How much memory this machine, or the container around this process, has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SHARE_FOR_CANDIDATES = 0.5
"""Share of it that one sandbox's candidates may use together; the trainer needs the rest."""
_NO_LIMIT = "max"


def candidates_at_once(memory: int, bytes_each: int) -> int:
    """How many candidates may run side by side in so much memory; at least one."""
    return max(1, int(SHARE_FOR_CANDIDATES * memory / bytes_each))


def machine_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that the processes of this machine, or of this control group, share.

    The smallest of `MemTotal` and the limits of this process's control group and of those around
    it, version 2 or 1; swap does not count. None where the kernel says nothing (it is not Linux).

    Args:
        root: folder in which `proc` and `sys` are.
    """
    return min([*_total(root / "proc/meminfo"), *_group_limits(root)], default=None)


def _total(meminfo: Path) -> Iterator[int]:
    for line in _lines(meminfo):
        name, _, amount = line.partition(":")
        if name == "MemTotal":
            yield int(amount.split()[0]) << 10


def _group_limits(root: Path) -> Iterator[int]:
    groups = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits(groups / "memory", path, "memory.limit_in_bytes")


def _limits(mount: Path, path: str, name: str) -> Iterator[int]:
    """Limits of a group and of every group around it.

    A container may see the path that its group has outside; then only the last of these files is
    there, and it is the container's own.
    """
    inner = PurePosixPath(path.lstrip("/"))
    for group in (inner, *inner.parents):
        for line in _lines(mount / group / name):
            if line != _NO_LIMIT:
                yield int(line)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        # Which of these files there are differs from machine to machine.
        return []
