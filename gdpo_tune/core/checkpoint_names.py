"""What checkpoints and their files are called; object stores have names, and no folders.

Names are relative to a trial's folder or to one above it. A checkpoint is whole once its marker is
there, which comes last and goes first, and every file that the marker lists has its size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

MARKER = "complete.json"
BEGIN = "checkpoint-"
_NAME = re.compile(rf"{BEGIN}(\d+)")


def step_of(name: str) -> int | None:
    """Steps that a checkpoint's folder of that name contains; None: that is none's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_of(name: str) -> str | None:
    """The checkpoint's folder that a file is in; None: it is in none."""
    return next((part for part in name.split("/")[:-1] if step_of(part) is not None), None)


def is_marker(name: str) -> bool:
    """Whether a file is what says that a checkpoint is whole."""
    return name.endswith(f"/{MARKER}") and checkpoint_of(name) is not None


def markers_apart(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The markers among the names of files, which come last and go first; and all others."""
    markers: list[str] = []
    others: list[str] = []
    for name in names:
        (markers if is_marker(name) else others).append(name)
    return markers, others


def is_small(name: str) -> bool:
    """Whether a file is of the kind that whoever looks at a sweep wants at hand."""
    return checkpoint_of(name) is None or is_marker(name)


def by_steps(names: Collection[str]) -> list[str]:
    """Folders of the checkpoints among a trial's files, the one of most steps first."""
    found = {folder for name in names if (folder := checkpoint_of(name)) is not None}
    return sorted(found, key=lambda folder: step_of(folder) or 0, reverse=True)


def whole_checkpoints(
    sizes: Mapping[str, int], read: Callable[[str], bytes | None]
) -> Iterator[str]:
    """Folders of a trial's whole checkpoints, the one of most steps first.

    Args:
        sizes: bytes of each file, relative to the trial's folder.
        read: what a file contains; None: it is not there.
    """
    for folder in by_steps(sizes):
        name = f"{folder}/{MARKER}"
        content = read(name) if name in sizes else None
        if content is not None and _matches(content, folder, sizes):
            yield folder


def _matches(marker: bytes, folder: str, sizes: Mapping[str, int]) -> bool:
    """Whether every file that a marker lists is there in full; a torn marker lists none."""
    try:
        listed: Mapping[str, Mapping[str, int]] = json.loads(marker)["files"]
    except (ValueError, KeyError, TypeError):
        return False
    return all(sizes.get(f"{folder}/{name}") == about["size"] for name, about in listed.items())
