"""Checkpoints that are whole or not there: written aside, marked last, then renamed.

A checkpoint is a folder `checkpoint-<step>` that `from_pretrained` reads, plus what training needs
to go on bitwise equal. Its marker `complete.json` lists every file with its size and a digest, and
is written after them; the folder gets its name only then. During training the two newest whole ones
stay, so that a damaged one costs a few steps and no trial. Light: importing this needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.core.checkpoint_names import BEGIN, MARKER, step_of
from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.files import room_in
from gdpo_tune.core.trials import Cost, Estimate

_UNFINISHED = ".unfinished-"
_KEPT = 2
"""Whole checkpoints of a running trial: the newest, and the one before should that be damaged."""
_DIGESTED = 32 * 2**20
"""Bytes at either end of a file that its digest covers. A file up to twice as large is covered
whole; of a larger one it is the header, the first and the last tensors, in a tenth of a second."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    """Steps of training that it contains."""
    cost: Cost
    """What the trial had spent by then."""
    validation: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """What an evaluation at this very step has found; empty where none took place."""


@dataclass(frozen=True)
class Found:
    """What a trial that starts again has to go on from."""

    newest: Path | None
    """Its newest whole checkpoint."""
    damaged: tuple[str, ...] = ()
    """What is wrong with each newer one, newest first."""

    def note(self) -> str:
        """One line for a person; empty if nothing is damaged."""
        if not self.damaged:
            return ""
        begin = f"goes on from {self.newest.name}" if self.newest else "begins anew"
        return f"{'; '.join(self.damaged)}: the trial {begin}"


def find_checkpoint(directory: Path) -> Found:
    """The whole checkpoint of most steps under a trial's folder, and what was passed over."""
    damaged: list[str] = []
    for path in _folders(directory):
        try:
            return Found(_read(path).path, tuple(damaged))
        except _Damaged as fault:
            damaged.append(str(fault))
    return Found(None, tuple(damaged))


def newest_valid_checkpoint(directory: Path) -> Path | None:
    """The whole checkpoint of most steps under a trial's folder; None if there is none.

    A folder without its marker, or with a file missing or changed, is passed over.
    """
    return find_checkpoint(directory).newest


def read_checkpoint(path: Path) -> Checkpoint:
    """What the marker of a checkpoint says.

    Raises:
        TrialFailure: the checkpoint is not whole.
    """
    try:
        return _read(path)
    except _Damaged as fault:
        raise TrialFailure(f"{fault} in {path.parent}") from None


def write_checkpoint(
    directory: Path,
    step: int,
    cost: Cost,
    fill: Callable[[Path], None],
    validation: Mapping[str, Estimate] | None = None,
) -> Checkpoint:
    """Write `directory/checkpoint-<step>`; whoever kills this leaves it whole or absent.

    Args:
        directory: the trial's folder; created if missing.
        step: steps of training so far.
        cost: what the trial has spent so far.
        fill: writes the checkpoint's files into the folder that it is given.
        validation: what an evaluation at this step has found.

    Raises:
        DiskFullError: there is no room for it; what was written of it is deleted.
    """
    checkpoint = Checkpoint(directory / f"{BEGIN}{step}", step, cost, validation or {})

    def fill_and_mark(folder: Path) -> None:
        fill(folder)
        _mark(folder, checkpoint)

    _write(checkpoint.path, fill_and_mark)
    return checkpoint


def adopt_checkpoint(source: Path, directory: Path) -> None:
    """Make a trial go on from another one's checkpoint, and from nothing else.

    Its own checkpoints are deleted. The copy shares its files with the original where the disk can
    do that, since no checkpoint is ever changed once it is there.

    Args:
        source: a whole checkpoint.
        directory: the trial's folder; created if missing.

    Raises:
        DiskFullError: there is no room for it.
    """

    def fill(folder: Path) -> None:
        for path in sorted(source.rglob("*")):  # a folder before what is in it
            target = folder / path.relative_to(source)
            if path.is_dir():
                target.mkdir()
            else:
                _link_or_copy(path, target)
        for path in (*folder.rglob("*"), folder):
            _sync(path)

    remove_all_but(directory, None)
    _write(directory / source.name, fill)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that cannot
        shutil.copy2(source, target)


def _write(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a checkpoint's folder in one step from what `fill` writes into the one aside."""
    directory, step = target.parent, target.name.removeprefix(BEGIN)
    aside = directory / f"{_UNFINISHED}{step}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with room_in(directory, f"the checkpoint of step {step}"):
            aside.mkdir(parents=True)
            fill(aside)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            _sync(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def keep_newest(directory: Path) -> None:
    """Delete all but the two newest whole checkpoints under a running trial's folder.

    Files are compared by size alone: reading them all again would cost what writing them did.
    """
    kept: list[Path] = []
    for path in _folders(directory):
        if len(kept) < _KEPT and _is_complete(path):
            kept.append(path)
        else:
            shutil.rmtree(path)
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)


def remove_all_but(directory: Path, kept: Path | None) -> None:
    """Delete the checkpoints under a trial's folder, unfinished ones too, except for one.

    Args:
        directory: the trial's folder; it need not exist.
        kept: stays as it is; None: nothing stays.
    """
    for path in [*_folders(directory), *directory.glob(f"{_UNFINISHED}*")]:
        if path != kept:
            shutil.rmtree(path)


class _Damaged(Exception):
    """Why a folder is no whole checkpoint."""


def _folders(directory: Path) -> list[Path]:
    """Folders that are named like checkpoints, the one of most steps first."""
    if not directory.is_dir():
        return []
    named = [(step_of(path.name), path) for path in directory.iterdir()]
    folders = [(step, path) for step, path in named if step is not None and path.is_dir()]
    return [path for _, path in sorted(folders, reverse=True)]


def _mark(folder: Path, checkpoint: Checkpoint) -> None:
    """Force the files of a checkpoint to disk, and then their list."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    listed = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _digest(path)}
        for path in files
    }
    marker = {
        "step": checkpoint.step,
        "cost": asdict(checkpoint.cost),
        "validation": {name: asdict(found) for name, found in checkpoint.validation.items()},
        "files": listed,
    }
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    _sync(folder / MARKER)
    _sync(folder)


def _marker(path: Path) -> dict[str, Any]:
    """What the marker says, once every file has the size that it states."""
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
        for name, expected in marker["files"].items():
            size = (path / name).stat().st_size
            if size != expected["size"]:
                stated = f"{size} bytes instead of {expected['size']}"
                raise _Damaged(f"{path.name} is incomplete ({name} has {stated})")
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise _Damaged(f"{path.name} is incomplete ({missing} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{path.name} is incomplete ({MARKER}: {error})") from error
    return marker


def _is_complete(path: Path) -> bool:
    try:
        _marker(path)
    except _Damaged:
        return False
    return True


def _read(path: Path) -> Checkpoint:
    marker = _marker(path)
    try:
        for name, expected in marker["files"].items():
            if _digest(path / name) != expected["sha256"]:
                raise _Damaged(f"{path.name} is damaged ({name} has other content)")
        known: Mapping[str, Any] = marker.get("validation", {})  # not there in earlier ones
        validation = {name: Estimate(**found) for name, found in known.items()}
        return Checkpoint(path, int(marker["step"]), Cost(**marker["cost"]), validation)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{path.name} is damaged ({error})") from error


def _digest(path: Path) -> str:
    """SHA-256 of a file's first and last `_DIGESTED` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_DIGESTED))
        rest = path.stat().st_size - _DIGESTED
        if rest > 0:
            file.seek(max(_DIGESTED, rest))
            digest.update(file.read())
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
