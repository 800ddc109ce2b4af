"""Checkpoints that are whole or not there: written aside, marked last, then renamed.

A checkpoint is a folder `checkpoint-<step>` that `from_pretrained` reads, plus what training needs
to go on bitwise equal. Its marker `complete.json` lists every file with its size and is written
after them; the folder gets its name only then. Light: importing this needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.errors import TrialFailure
from gdpo_tune.trials import Cost

MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    """Steps of training that it contains."""
    cost: Cost
    """What the trial had spent by then."""


def newest_valid_checkpoint(directory: Path) -> Path | None:
    """The whole checkpoint of most steps under a trial's folder; None if there is none.

    A folder without its marker, or with a file missing or of another size, is passed over.
    """
    found = [checkpoint for path in _folders(directory) if (checkpoint := _read(path)) is not None]
    return max(found, key=lambda checkpoint: checkpoint.step).path if found else None


def read_checkpoint(path: Path) -> Checkpoint:
    """What the marker of a checkpoint says.

    Raises:
        TrialFailure: the checkpoint is not whole.
    """
    checkpoint = _read(path)
    if checkpoint is None:
        raise TrialFailure(f"checkpoint {path} is incomplete or damaged")
    return checkpoint


def write_checkpoint(
    directory: Path, step: int, cost: Cost, fill: Callable[[Path], None]
) -> Checkpoint:
    """Write `directory/checkpoint-<step>`; whoever kills this leaves it whole or absent.

    Args:
        directory: the trial's folder; created if missing.
        step: steps of training so far.
        cost: what the trial has spent so far.
        fill: writes the checkpoint's files into the folder that it is given.
    """
    target = directory / f"checkpoint-{step}"
    aside = directory / f"{_UNFINISHED}{step}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    fill(aside)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    sizes = {str(path.relative_to(aside)): path.stat().st_size for path in files}
    marker = {"step": step, "cost": asdict(cost), "files": sizes}
    (aside / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    _sync(aside / MARKER)
    _sync(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    _sync(directory)
    return Checkpoint(target, step, cost)


def keep_only(checkpoint: Checkpoint) -> None:
    """Delete every other checkpoint, and unfinished ones, of the same trial."""
    remove_all_but(checkpoint.path.parent, checkpoint.path)


def remove_all_but(directory: Path, kept: Path | None) -> None:
    """Delete the checkpoints under a trial's folder, unfinished ones too, except for one.

    Args:
        directory: the trial's folder; it need not exist.
        kept: stays as it is; None: nothing stays.
    """
    for path in [*_folders(directory), *directory.glob(f"{_UNFINISHED}*")]:
        if path != kept:
            shutil.rmtree(path)


def _folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]


def _read(path: Path) -> Checkpoint | None:
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
        sizes: dict[str, int] = marker["files"]
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return Checkpoint(path, int(marker["step"]), Cost(**marker["cost"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
