"""Processes below this one, written down so that the next start can end what a kill has left."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from gdpo_tune.core.files import write_whole
from gdpo_tune.core.processes import creation, process_of


def children() -> set[tuple[int, float]]:
    """Pid and time of creation, which tell a reused pid, of every process below this one."""
    return {
        (child.pid, created)
        for child in psutil.Process().children(recursive=True)
        if (created := creation(child)) is not None
    }


def remember(file: Path, processes: Iterable[tuple[int, float]]) -> None:
    """Write down processes for `end_orphans` of the next start."""
    write_whole(file, json.dumps(sorted(processes)))


def remembered(file: Path) -> list[tuple[int, float]]:
    """What `remember` wrote down; nothing if that cannot be read."""
    try:
        return [(int(pid), float(created)) for pid, created in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError):
        return []


def end_orphans(file: Path) -> None:
    """End what is left of the processes that a killed run wrote down."""
    end(remembered(file))
    file.unlink(missing_ok=True)


def end(processes: Iterable[tuple[int, float]]) -> None:
    """End those of these processes that are still there and ours to end."""
    for pid, created in processes:
        process = process_of(pid, created)
        if process is not None:
            with suppress(psutil.Error):
                process.kill()
