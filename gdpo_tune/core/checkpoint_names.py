"""Names of checkpoints and their files, relative to a trial's directory or to one above it.

A checkpoint is whole once its marker exists and every file that the marker lists has its size. The
marker is written last and deleted first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

MARKER = "complete.json"
CHECKPOINT_PREFIX = "checkpoint-"
ADAPTER = "adapter"
"""Directory of the adapter inside a checkpoint that holds the merged policy."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that every directory of an adapter holds."""
_NAME = re.compile(rf"{CHECKPOINT_PREFIX}(\d+)")


def parse_step(name: str) -> int | None:
    """Return the steps that the checkpoint in a directory of that name contains; None: no name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def find_checkpoint_name(path: str) -> str | None:
    """Return the name of the checkpoint that a file belongs to; None if it belongs to none."""
    return next((part for part in path.split("/")[:-1] if parse_step(part) is not None), None)


def is_marker(path: str) -> bool:
    """Return whether a file marks a checkpoint as whole."""
    return path.endswith(f"/{MARKER}") and find_checkpoint_name(path) is not None


def sort_checkpoints(paths: Iterable[str]) -> list[str]:
    """Return the names of the checkpoints among a trial's files, the one of most steps first."""
    names = {name for path in paths if (name := find_checkpoint_name(path)) is not None}
    return sorted(names, key=lambda name: parse_step(name) or 0, reverse=True)


def iterate_whole_checkpoints(
    sizes: Mapping[str, int], read: Callable[[str], bytes | None]
) -> Iterator[str]:
    """Yield the names of a trial's whole checkpoints, the one of most steps first.

    `sizes` are the bytes of each file, by its path in the trial's directory; `read` returns a
    file's content, or None if it does not exist.
    """
    for name in sort_checkpoints(sizes):
        marker = read(f"{name}/{MARKER}") if f"{name}/{MARKER}" in sizes else None
        try:
            files: Mapping[str, Mapping[str, int]] = json.loads(marker or b"")["files"]
        except (ValueError, KeyError, TypeError):
            continue  # no marker, or a torn one
        if all(sizes.get(f"{name}/{file}") == about["size"] for file, about in files.items()):
            yield name
