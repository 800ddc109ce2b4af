"""Files that are whole or absent, and errors that say that a disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gdpo_tune.core.errors import DiskFullError, UsageError

DATA_FILES = (".jsonl", ".parquet")
"""Suffixes of local data files."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_PART, LONGEST_PATH = 255, 4095
"""Most bytes of the name of a file or directory, and of a path, on every usual disk."""
_NEARLY_FULL = 64 * 1024
"""Bytes. With less free space, a write that failed without a reason failed for lack of space."""


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old content or the new one.

    The directory of `path` exists; text is written as UTF-8, and what UTF-8 lacks as an escape.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
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
def explain_write_errors(subject: str) -> Generator[None]:
    """Turn a failure to write `subject` to a user's path into a usage error.

    Raises:
        UsageError: it cannot be written there, for another reason than lack of space.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UsageError(
            f"{subject} cannot be written: {error}\n    fix: make its directory writable, or work "
            "on a copy of it"
        ) from error


def is_file(path: Path) -> bool:
    """Return whether a file exists; unlike `Path.is_file`, False for a name that is too long."""
    return os.path.isfile(path)


def is_directory(path: Path) -> bool:
    """Return whether a directory exists; unlike `Path.is_dir`, False for a name too long."""
    return os.path.isdir(path)


def is_present(path: Path) -> bool:
    """Return whether a file or directory exists; unlike `Path.exists`, no path raises an error."""
    return os.path.exists(path)


def expand_home(path: str) -> Path:
    """Return a path with `~` expanded; `~` of an unknown user stays."""
    return Path(os.path.expanduser(path))


def find_path_problem(path: str) -> str:
    """Return why no file or directory can have this path; empty if one can."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        return "there is no user of that name"
    if "\0" in expanded:
        return "a character that no name can have"
    sizes = [len(part.encode(errors="replace")) for part in Path(expanded).parts]
    if max(sizes, default=0) > LONGEST_PART:
        return f"a name in it has more than {LONGEST_PART} bytes"
    if sum(sizes) + len(sizes) > LONGEST_PATH:
        return f"a path of more than {LONGEST_PATH:,} bytes"
    return ""


@contextmanager
def explain_full_disk(directory: Path, subject: str) -> Generator[None]:
    """Turn a failure to write `subject` to a full disk into a `DiskFullError`.

    Raises:
        DiskFullError: the block failed because no space was left there, or for this user.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not _has_too_little_space(error, directory):
            raise
        raise build_disk_full_error(directory, subject) from error


def build_disk_full_error(directory: Path, subject: str) -> DiskFullError:
    """Build the error for a failure to write `subject` into a directory on a full disk."""
    free = _count_free_bytes(directory)
    return DiskFullError(
        f"no space left for {subject} in {directory}: {free:,} bytes free\n"
        "    fix: make room there and run the same command to resume from the last whole "
        "checkpoints; keep another sweep elsewhere with --set storage=DIRECTORY"
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk or quota is among the causes of an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DiskFullError):
            return True
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _has_too_little_space(error: Exception, directory: Path) -> bool:
    # Libraries that write tensors raise their own errors, which may not name the cause.
    free = _count_free_bytes(directory)
    return is_disk_full(error) or "os error 28" in str(error) or free < _NEARLY_FULL


def _count_free_bytes(directory: Path) -> int:
    """Return the bytes that this user may still write."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
