"""Requests on their way to the driver: one file each, in the sweep's directory.

    <storage>/<name>/requests/<asked, in nanoseconds>-<id>.json
                     requests/damaged/     files that are no requests, set aside

A file is whole or absent, and durable before the person is told. The driver records the request in
the ledger before it removes the file. A file whose request is recorded already is only removed.
"""

from __future__ import annotations

import getpass
import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import Request
from gdpo_tune.core.files import is_directory, write_atomically

REQUESTS = "requests"
"""Directory in that of a sweep."""
DAMAGED = "damaged"
"""Directory below it for files that are no requests."""
LARGEST = 1_000_000
"""Most bytes of a file that is read."""
LONGEST_AUTHOR = 100
"""Most characters of a name."""
LAST_SECOND = 2**33
"""Unix time beyond which nobody asks."""


@dataclass(frozen=True)
class RequestFile:
    """A file that waits for the driver."""

    path: Path
    request: Request | None
    """None: the file holds no request."""
    problem: str = ""
    """Why it holds none."""


def build_request(action: str, arguments: Any, author: str | None) -> Request:
    """Build a request of this moment; its author is by default the user of this process.

    Raises:
        UsageError: `arguments` are no mapping.
    """
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{action}: the arguments are {arguments!r}; write a dict, such as {{}}")
    words = (find_user() if author is None else author).split()
    name = "".join(filter(str.isprintable, " ".join(words)))[:LONGEST_AUTHOR]
    return Request(uuid.uuid4().hex[:16], action, dict(arguments), name or "unknown", time.time())


def find_user() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number that has no name
        return f"user {os.getuid()}"


def write_request(directory: Path, request: Request) -> Path:
    """Leave a request in a sweep's directory, whole and durable; return its file.

    Raises:
        UsageError: this user may not write there, or no directory can be there.
        OSError: the disk is full or broken.
    """
    check_writable(directory)
    requests = directory / REQUESTS
    path = requests / f"{int(request.asked * 1e9):020}-{request.id}.json"
    if not requests.exists():
        requests.mkdir(exist_ok=True)
        requests.chmod(directory.stat().st_mode & 0o7777)  # who may write there may ask too
    write_atomically(path, json.dumps(asdict(request)))
    for changed in (requests, directory):
        descriptor = os.open(changed, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network disks cannot; they write names at once
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return path


def check_writable(directory: Path) -> None:
    """Refuse to leave requests in the sweep of another user, or where no directory can be.

    Raises:
        UsageError: this user may not write there, or something else has the directory's name.
    """
    requests = directory / REQUESTS
    if os.path.lexists(requests) and not is_directory(requests):
        raise UsageError(
            f"{requests} is no directory, so no request can be left there\n    fix: move it away"
        )
    if not os.access(requests if requests.exists() else directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"{directory} belongs to {_find_owner(directory)}, and you may not write there\n"
            "    fix: ask them, or ask for permission to write to the sweep's directory"
        )


def list_pending(directory: Path) -> list[RequestFile]:
    """Return the files that wait in a sweep's directory, in the order of their names."""
    with suppress(OSError):  # absent, no directory, or for now out of reach
        names = sorted(n for n in os.listdir(directory / REQUESTS) if is_request_name(n))
        files = [read_request_file(directory / REQUESTS / name) for name in names]
        return [file for file in files if file is not None]
    return []


def is_request_name(name: str) -> bool:
    """Return whether a file of this name counts; drafts begin with a dot."""
    return name != DAMAGED and not name.startswith(".")


def read_request_file(path: Path) -> RequestFile | None:
    """Read a file; None if it is gone by now."""
    try:
        if path.stat().st_size > LARGEST:
            return RequestFile(path, None, f"it has more than {LARGEST:,} bytes")
        return RequestFile(path, decode_request(json.loads(path.read_bytes())))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return RequestFile(path, None, f"{type(error).__name__}: {error}")


def decode_request(stored: Any) -> Request:
    """Return a request from JSON.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    kinds = {"id": str, "action": str, "arguments": dict, "author": str, "asked": int | float}
    values = {name: stored[name] for name in kinds}
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            raise ValueError(f"{name} = {values[name]!r}")
    if not 0 <= values["asked"] < LAST_SECOND:
        raise ValueError(f"asked = {values['asked']!r} is no time")
    json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # it can be stored and shown
    return Request(**values)


def set_aside(path: Path) -> None:
    """Move a file that is no request out of the way; nothing is deleted."""
    aside = path.parent / DAMAGED
    aside.mkdir(exist_ok=True)
    path.rename(aside / path.name)


def _find_owner(directory: Path) -> str:
    with suppress(OSError, KeyError):
        return directory.owner()
    return "another user"
