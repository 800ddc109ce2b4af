"""Checkpoints of a trial, each complete or absent.

A checkpoint is a directory `checkpoint-<step>` that `from_pretrained` reads, plus the state that
makes a resumed training bitwise equal. Its marker `complete.json` lists every file with size and
digest, and is written after them; the directory gets its name last. A running trial keeps its two
newest complete checkpoints, so that a damaged one costs a few steps and not the trial, and those
that may become candidates.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.files import explain_full_disk, write_atomically
from gdpo_tune.core.trial_files import MARKER, NEWEST_KEPT
from gdpo_tune.core.trials import CHECKPOINT_PREFIX, Cost, Estimate, parse_step

OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
WEIGHTS_ONLY = "weights_only"
"""Key of a marker whose checkpoint has lost its optimizer."""
_UNFINISHED = ".unfinished-"
_DIGESTED = 32 * 2**20
"""Bytes at either end of a file that its digest covers: all of a file up to twice as large; of a
larger one the header, the first and the last tensors, in a tenth of a second."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    """Steps of training that it contains."""
    cost: Cost
    validation: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """Result of an evaluation at this step; empty if none took place."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a trial resumes, and the newer ones that are damaged."""

    newest: Path | None
    damaged: tuple[str, ...] = ()
    """Damage of each newer checkpoint, newest first."""

    def describe_damage(self) -> str:
        """Describe the damage in one line; empty if nothing is damaged."""
        if not self.damaged:
            return ""
        how = f"resumes from {self.newest.name}" if self.newest else "starts over"
        return f"{'; '.join(self.damaged)}: the trial {how}"


def find_checkpoint(directory: Path) -> ResumePoint:
    """Find the complete checkpoint of most steps in a trial's directory.

    A checkpoint without its marker, or with a file that is missing or changed, is damaged. One of
    weights alone, before the end, does not count.
    """
    damaged: list[str] = []
    for path in _list_checkpoints(directory):
        try:
            checkpoint = _read(path)
            if not _read_marker(path).get(WEIGHTS_ONLY):
                return ResumePoint(checkpoint.path, tuple(damaged))
        except _DamagedError as error:
            damaged.append(str(error))
    return ResumePoint(None, tuple(damaged))


def find_newest_checkpoint(directory: Path) -> Path | None:
    """Return the checkpoint of `find_checkpoint`; None if there is none."""
    return find_checkpoint(directory).newest


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the marker of a checkpoint.

    Raises:
        TrialFailure: the checkpoint is not complete.
    """
    try:
        return _read(path)
    except _DamagedError as error:
        raise TrialFailure(f"{error} in {path.parent}") from None


def write_checkpoint(
    directory: Path,
    step: int,
    cost: Cost,
    fill: Callable[[Path], None],
    validation: Mapping[str, Estimate] | None = None,
) -> Checkpoint:
    """Write `directory/checkpoint-<step>`; a process that dies leaves it complete or absent.

    `directory` is that of the trial, created if missing; `fill` writes the checkpoint's files into
    the directory that it gets.

    Raises:
        DiskFullError: there is no room for it; the part that was written is deleted.
    """
    checkpoint = Checkpoint(directory / f"{CHECKPOINT_PREFIX}{step}", step, cost, validation or {})
    subject = f"the checkpoint of step {step}"
    draft = create_draft(directory, str(step), subject)
    with draft as temporary, explain_full_disk(directory, subject):
        fill(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        for path in files:
            _sync(path)
        marker = {
            "step": step,
            "cost": asdict(cost),
            "validation": {name: asdict(v) for name, v in checkpoint.validation.items()},
            "files": {
                str(file.relative_to(temporary)): {
                    "size": file.stat().st_size,
                    "sha256": _hash(file),
                }
                for file in files
            },
        }
        (temporary / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        _sync(temporary / MARKER)
        _sync(temporary)
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        temporary.rename(checkpoint.path)
        _sync(directory)
    return checkpoint


@contextmanager
def create_draft(
    directory: Path, name: str = "draft", subject: str = "a policy", *, is_writer: bool = True
) -> Generator[Path]:
    """Yield an empty directory in a trial's directory that is deleted after the block.

    A process that dies leaves it to the next one to delete. Of several processes, one is the
    writer, and the others only get the name. `subject` is what it is for, in errors.
    """
    draft = directory / f"{_UNFINISHED}{name}"
    if not is_writer:
        yield draft
        return
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with explain_full_disk(directory, subject):
            draft.mkdir(parents=True)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def keep_newest(directory: Path, steps: Collection[int] = ()) -> None:
    """Delete a running trial's checkpoints but the two newest complete ones and those of `steps`.

    The latter keep no optimizer, because no training resumes from them. Files are compared by size
    alone: reading them would take as long as writing them did.
    """
    complete = [path for path in _list_checkpoints(directory) if _is_complete(path)]
    kept = [path for path in complete[NEWEST_KEPT:] if parse_step(path.name) in steps]
    remove_all_but(directory, *complete[:NEWEST_KEPT], *kept)
    for path in kept:
        drop_optimizer(path)


def drop_optimizer(path: Path) -> None:
    """Delete the optimizer's file of a checkpoint, which stays complete; not of a damaged one."""
    if not (path / OPTIMIZER_FILE).exists() or not _is_complete(path):
        return
    marker = _read_marker(path)
    marker["files"].pop(OPTIMIZER_FILE, None)
    write_atomically(path / MARKER, json.dumps({**marker, WEIGHTS_ONLY: True}))
    (path / OPTIMIZER_FILE).unlink()


def remove_all_but(directory: Path, *kept: Path) -> None:
    """Delete a trial's checkpoints, unfinished ones too, except for `kept`.

    The directory does not have to exist.
    """
    for path in [*_list_checkpoints(directory), *directory.glob(f"{_UNFINISHED}*")]:
        if path not in kept:
            shutil.rmtree(path)


class _DamagedError(Exception):
    """Reason why a directory is no complete checkpoint."""


def _list_checkpoints(directory: Path) -> list[Path]:
    """List the directories that are named like checkpoints, the one of most steps first."""
    if not directory.is_dir():
        return []
    named = [(parse_step(path.name), path) for path in directory.iterdir()]
    checkpoints = [(step, path) for step, path in named if step is not None and path.is_dir()]
    return [path for _, path in sorted(checkpoints, reverse=True)]


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file of a checkpoint, which never changes, or copy it where no link is possible."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copy2(source, target)


def _read_marker(path: Path) -> dict[str, Any]:
    """Read a marker and compare the size of every file that it lists."""
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
        for name, expected in marker["files"].items():
            size = (path / name).stat().st_size
            if size != expected["size"]:
                sizes = f"{size} bytes instead of {expected['size']}"
                raise _DamagedError(f"{path.name} is incomplete ({name} has {sizes})")
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise _DamagedError(f"{path.name} is incomplete ({missing} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{path.name} is incomplete ({MARKER}: {error})") from error
    return marker


def _is_complete(path: Path) -> bool:
    try:
        _read_marker(path)
    except _DamagedError:
        return False
    return True


def _read(path: Path) -> Checkpoint:
    marker = _read_marker(path)
    try:
        for name, expected in marker["files"].items():
            if _hash(path / name) != expected["sha256"]:
                raise _DamagedError(f"{path.name} is damaged ({name} has other content)")
        validation = {name: Estimate(**value) for name, value in marker["validation"].items()}
        return Checkpoint(path, int(marker["step"]), Cost(**marker["cost"]), validation)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{path.name} is damaged ({error})") from error


def _hash(path: Path) -> str:
    """Return the SHA-256 of a file's first and last `_DIGESTED` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_DIGESTED))
        rest = path.stat().st_size - _DIGESTED
        if rest > 0:
            file.seek(max(_DIGESTED, rest))
            digest.update(file.read())
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
