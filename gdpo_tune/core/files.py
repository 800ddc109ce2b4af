"""Files that are whole or not there, and what to say when there is no room for one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gdpo_tune.core.errors import DiskFullError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEARLY_FULL = 64 * 1024
"""Bytes. Below this, a write that failed for no stated reason failed for want of space."""


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replace `path` in one step: a reader, or a crash, sees the old content or the new one.

    Args:
        path: its folder exists.
        content: text is written as UTF-8.
        mode: permissions of the file.
    """
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)  # half a file, on a disk that may be full
        error.filename = error.filename or str(path)
        raise


@contextmanager
def writing(what: str) -> Generator[None]:
    """Writing `what` where a person asked for it.

    Raises:
        UsageError: it cannot be written there, for another reason than want of space.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UsageError(
            f"{what} cannot be written: {error}\n    fix: make that place writable, or work on a "
            "copy of the folder"
        ) from error


def is_file(path: Path) -> bool:
    """Whether there is a file; what is too long to be a path is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder; what is too long to be a path is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


@contextmanager
def room_in(folder: Path, what: str) -> Generator[None]:
    """Writing `what` into `folder`.

    Raises:
        DiskFullError: the block failed because no space was left there, or for this user.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not _for_want_of_space(error, folder):
            raise
        raise disk_full(folder, what) from error


def disk_full(folder: Path, what: str) -> DiskFullError:
    """What to tell when `what` could not be written into `folder`."""
    free = _free(folder)
    return DiskFullError(
        f"no space left for {what} in {folder}: {free:,} bytes free\n"
        "    fix: make room there and give the same command again, which goes on from the last "
        "whole checkpoints; keep another sweep elsewhere with --set storage=FOLDER"
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or quota is among the causes of an error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DiskFullError):
            return True
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _for_want_of_space(error: Exception, folder: Path) -> bool:
    # What writes tensors raises errors of its own kind, with the cause in words or without.
    return is_disk_full(error) or "os error 28" in str(error) or _free(folder) < _NEARLY_FULL


def _free(folder: Path) -> int:
    """Bytes that this user may still write."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
