"""Files that are whole or absent, and errors that say that a disk is full."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gdpo_tune.core.errors import DiskFullError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HUB_NAME = r"\w(?:[\w.-]{0,94}\w)?"
HUB_ID = re.compile(f"{_HUB_NAME}/{_HUB_NAME}", re.ASCII)
"""Form of the id of a policy or data set on the Hub: `USER/NAME`.

Source: `REPO_ID_REGEX` of huggingface_hub."""
DATA_FILES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".csv", ".parquet")
"""Suffixes of local data files, in lower case."""
DATA_KINDS = ".json, .jsonl (also .gz), .csv or .parquet"
"""Suffixes of local data files, as messages list them."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
"""Variable of the environment in a path, as shells write it."""
_LONGEST_PART, _LONGEST_PATH = 255, 4095
"""Most bytes of the name of a file or directory, and of a path, on every usual disk."""
_NEARLY_FULL = 64 * 1024
"""Bytes. With less free space, a write that failed without a reason failed for lack of space."""


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old content or the new one.

    The directory of `path` exists; text is written as UTF-8, with escapes for
    what that cannot encode.
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
    """Turn a failure to write `subject` into a `UsageError`, but for a full disk."""
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


def find_write_problem(directory: Path) -> str:
    """Return why a directory could not be made or written, without making it; empty if it could."""
    absolute = directory.absolute()
    place = next(each for each in (absolute, *absolute.parents) if path_exists(each))
    if not is_directory(place):
        return f"{place} is a file"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable"


def is_directory(path: Path) -> bool:
    """Return whether a directory exists; unlike `Path.is_dir`, False for a name too long."""
    return os.path.isdir(path)


def path_exists(path: Path) -> bool:
    """Return whether a file or directory exists; unlike `Path.exists`, no path raises an error."""
    return os.path.exists(path)


def expand_path(path: str) -> Path:
    """Return a path with `~`, `$NAME` and `${NAME}` expanded; an unknown user or variable stays.

    A part with a `$` that exists is taken literally: a directory may have such a name.
    """
    return _expand(path)[0]


def find_path_problem(path: str) -> str:
    """Return why no file or directory can have this path; empty if one can."""
    expanded, unset, unknown = _expand(path)
    if unset:
        return f"the variable {unset[0]} is not set (export {unset[0]}=...)"
    if unknown:
        return f"{unknown[0]} is not filled in: a $ begins a variable as $NAME or ${{NAME}} alone"
    if str(expanded).startswith("~"):
        return "there is no user of that name"
    if "\0" in path:
        return "a character that no name can have"
    sizes = [len(part.encode(errors="replace")) for part in expanded.parts]
    if max(sizes, default=0) > _LONGEST_PART:
        return f"a name in it has more than {_LONGEST_PART} bytes"
    if sum(sizes) + len(sizes) > _LONGEST_PATH:
        return f"a path of more than {_LONGEST_PATH:,} bytes"
    return ""


def _expand(path: str) -> tuple[Path, list[str], list[str]]:
    """Return a path as `expand_path`, variables that are unset or empty, and parts with another $.

    Such a part is `${SCRATCH:-/tmp}` of a shell or `${oc.env:SCRATCH}` of OmegaConf.
    """
    unset: list[str] = []
    unknown: list[str] = []

    def read(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        unset.extend([] if os.environ.get(name) else [name])
        return os.environ.get(name) or found[0]

    result = Path()
    for part in Path(os.path.expanduser(path)).parts:
        literal = result / part
        is_literal = "$" not in part or path_exists(literal)
        unknown += [] if is_literal or "$" not in _VARIABLE.sub("", part) else [part]
        result = literal if is_literal else Path(result, _VARIABLE.sub(read, part))
    return result, unset, unknown


def is_data_file(file: Path) -> bool:
    """Return whether the suffix is that of a data file."""
    return file.name.lower().endswith(DATA_FILES)


def is_local_source(source: str) -> bool:
    """Return whether a source is a path: it exists, or cannot be an id on the Hub."""
    path = expand_path(source)
    return not HUB_ID.fullmatch(source) or is_data_file(path) or path_exists(path)


def list_data_files(source: Path) -> list[Path]:
    """Return the files that a local source may hold, sorted; empty if there is none.

    Those of a directory are at any depth, the tables of `save_to_disk` among them; hidden ones are
    left out, as `load_dataset` leaves them out.
    """
    if not is_directory(source):
        return [source] if is_file(source) and is_data_file(source) else []
    found: list[Path] = []
    for place, directories, names in os.walk(source):
        directories[:] = [name for name in directories if not name.startswith((".", "__"))]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if is_data_file(file) or file.suffix == ".arrow")


@contextmanager
def explain_full_disk(directory: Path, subject: str) -> Generator[None]:
    """Turn a failure to write `subject` into a `DiskFullError` where no space is left for it."""
    try:
        yield
    except Exception as error:
        # Libraries that write tensors raise their own errors, which may not name the cause.
        is_full = is_disk_full(error) or "os error 28" in str(error)
        is_full = is_full or _count_free_bytes(directory) < _NEARLY_FULL
        if isinstance(error, DiskFullError) or not is_full:
            raise
        raise build_disk_full_error(directory, subject, error) from error


def build_disk_full_error(directory: Path, subject: str, error: BaseException) -> DiskFullError:
    """Build the error for a failure to write `subject` into a directory on a full disk."""
    reason, fix = explain_no_space(directory, error)
    return DiskFullError(
        f"no space left for {subject} in {directory}: {reason}\n"
        f"    fix: {fix} and run the same command to resume from the last whole "
        "checkpoints; keep another sweep elsewhere with --set storage=DIRECTORY"
    )


def explain_no_space(directory: Path, error: BaseException) -> tuple[str, str]:
    """Return why a disk took no more, and what to do.

    Source: errno(3), setrlimit(2) for EFBIG, and statvfs(3) for inodes, which some file systems do
    not count.
    """
    codes = {each.errno for each in list_causes(error) if isinstance(each, OSError)}
    if errno.EFBIG in codes:
        return "a file would be larger than a limit allows", "raise the limit (ulimit -f unlimited)"
    if errno.EDQUOT in codes:
        return "your quota is used up", "delete files there, or ask for a larger quota,"
    with suppress(OSError):
        found = os.statvfs(directory)
        if found.f_files and not found.f_favail:
            return "no inode is free, whatever the bytes (df -i)", "delete small files there"
    return f"{_count_free_bytes(directory):,} bytes free", "make room there"


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk or quota is among the causes of an error."""
    return any(
        isinstance(cause, DiskFullError) or (isinstance(cause, OSError) and cause.errno in _FULL)
        for cause in list_causes(error)
    )


def list_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what led to it, the first cause last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _count_free_bytes(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
