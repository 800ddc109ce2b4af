"""Directories of an object store, by an address that fsspec knows.

Light: fsspec, and the package behind a scheme, are imported only where a store is opened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import StoreError, StoreUnreachableError, get_first_line
from gdpo_tune.core.files import is_disk_full
from gdpo_tune.core.http import OUTAGE_SECONDS, build_retry
from gdpo_tune.core.trial_files import is_marker

SPEC = "spec.yaml"
"""Name of the resolved file in a sweep's directory."""
JOURNAL = "ledger.journal"
"""Name of the file of all trials in a sweep's directory."""
RUNS = "runs"
"""Default directory of all sweeps."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_S3, _GCS, _AZURE = "s3fs", "gcsfs", "adlfs"
PACKAGES = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE}
"""Scheme of an address -> the package that reads it."""
_ON_DISK = ("file", "local")
"""Schemes of directories, which have to be created; an object store needs none."""
CACHE = "GDPO_TUNE_CACHE"
"""Environment variable: directory of this machine for work on sweeps that are kept elsewhere."""
READ_PATIENCE = 20.0
"""Seconds to wait for an object store that does not answer, when a sweep is only read."""
_LONGEST_PAUSE = 30.0
"""Seconds between two attempts at most: stores slow down clients that ask too often."""
_RAISE = object()
REFUSALS = (401, 403, 404)
"""HTTP statuses of a wrong key and of a missing bucket: asking again does not help."""


def is_url(storage: str) -> bool:
    """Return whether storage is an object store, not a directory."""
    return URL.match(storage) is not None


def join_address(address: str, *names: str) -> str:
    """Return an address below another one."""
    return "/".join([address.rstrip("/"), *names])


def find_cache_directory() -> Path:
    """Return the directory of this machine for copies of sweeps, digests and other caches."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get(CACHE) or f"{base}/gdpo_tune")).absolute()


def find_local_copy(address: str) -> Path:
    """Return where this machine keeps copies of what lies at an address."""
    scheme, _, path = address.partition("://")
    return find_cache_directory().joinpath(scheme.lower(), *filter(None, path.split("/")))


def find_address(directory: Path) -> str:
    """Return the address that a directory of this machine is a copy of; empty if it is none."""
    try:
        scheme, *names = directory.absolute().relative_to(find_cache_directory()).parts
    except ValueError:
        return ""
    return f"{scheme}://{'/' if scheme in _ON_DISK else ''}{'/'.join(names)}" if names else ""


def list_copied_addresses(name: str) -> list[str]:
    """Return the addresses of sweeps of this name that this machine has copies of."""
    addresses: list[str] = []
    for directory, below, files in os.walk(find_cache_directory()):
        if SPEC in files:
            below.clear()  # no sweep lies below another one
            if os.path.basename(directory) == name:
                addresses.append(find_address(Path(directory)))
    return sorted(addresses)


def open_filesystem(address: str) -> tuple[Any, str]:
    """Return fsspec's filesystem for an address, and its path there without a `/` at the end.

    Raises:
        StoreError: the scheme is unknown, lacks its package, or needs more than an address.
    """
    import fsspec

    scheme = address.partition("://")[0].lower()
    options = {"auto_mkdir": True} if scheme in _ON_DISK else {}
    try:
        # a cached listing would hide what others have written
        filesystem, root = fsspec.url_to_fs(address, use_listings_cache=False, **options)
    except Exception as error:  # each package has errors of its own, and some look for their server
        fix = f"pip install {PACKAGES[scheme]}" if scheme in PACKAGES else "write s3://, gs://"
        raise StoreError(f"storage {address}: {get_first_line(error)}\n    fix: {fix}") from error
    return filesystem, root.rstrip("/")


def build_store_error(address: str, error: BaseException) -> StoreError:
    """Return the error to raise when nothing can be read or written at an address."""
    return StoreError(
        f"storage {address}: {get_first_line(error)}\n"
        "    fix: make it readable and writable, or write another storage"
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether a store answers and refuses; any other error may pass."""
    status = getattr(error, "status_code", getattr(error, "code", None))
    refused = isinstance(error, PermissionError | FileNotFoundError) or status in REFUSALS
    return refused or type(error).__name__ == "NoCredentialsError"


class StoreDirectory:
    """Files below one address; names are relative to it, with `/` between directories.

    Every call is repeated for `patience` seconds while the store does not answer, which is safe: no
    call adds to a file. `say` is called once then, and once when it answers again. Markers of
    checkpoints are written after all other files, and deleted before them.

    Raises:
        StoreError: the store refuses, or the package for its scheme is not installed.
        StoreUnreachableError: the store does not answer for as long as it is waited for.
        OSError: the disk of this machine is full.
    """

    def __init__(
        self,
        address: str,
        *,
        patience: float = OUTAGE_SECONDS,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.address = address
        self._patience = patience
        self._say = say
        self._files, self._root = open_filesystem(address)

    def list_sizes(self, below: str = "") -> dict[str, int]:
        """Return the bytes of every file below a directory, by name; empty if there is none."""
        root = self._get_path(below).rstrip("/")
        files: dict[str, Any] = self._ask("find", root, detail=True, absent={})
        return {path[len(self._root) + 1 :]: int(about["size"]) for path, about in files.items()}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        return self._ask("cat_file", self._get_path(name), absent=None)

    def get_size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it does not exist."""
        return self._ask("size", self._get_path(name), absent=None)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        self._ask("pipe_file", self._get_path(name), content)

    def upload(self, files: Mapping[str, Path]) -> None:
        """Write files of this machine under the given names."""
        for names in _group_by_marker(files):
            self._ask("put", [str(files[name]) for name in names], self._get_paths(names))

    def download(self, files: Mapping[str, Path]) -> None:
        """Copy files to this machine; their directories are created."""
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        for names in _group_by_marker(files):
            self._ask("get", self._get_paths(names), [str(files[name]) for name in names])

    def copy(self, names: Mapping[str, str]) -> None:
        """Copy files within the store: name of each -> name of its copy."""
        for sources in _group_by_marker(names):
            copies = self._get_paths(names[name] for name in sources)
            self._ask("copy", self._get_paths(sources), copies)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; some of them may not exist."""
        for group in reversed(_group_by_marker(names)):
            if self._ask("rm", self._get_paths(group), absent=False) is False:
                for name in group:  # a repetition, of which some were gone
                    self._ask("rm_file", self._get_path(name), absent=None)

    def _get_path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _get_paths(self, names: Iterable[str]) -> list[str]:
        return [self._get_path(name) for name in names]

    def _ask(self, method: str, *arguments: Any, absent: Any = _RAISE, **options: Any) -> Any:
        """Return what a method of fsspec returns, however often the store has to be asked.

        A file that does not exist is a refusal, or gives `absent`.
        """
        from tenacity import retry_if_exception

        def is_outage(error: BaseException) -> bool:
            final = is_refusal(error) or is_disk_full(error)
            return isinstance(error, Exception) and not final

        def say(state: Any) -> None:
            if state.attempt_number == 1:
                self._say(f"waits for {self.address}: {get_first_line(state.outcome.exception())}")

        began = time.monotonic()
        retrying = build_retry(
            self._patience,
            longest=_LONGEST_PAUSE,
            retry=retry_if_exception(is_outage),
            before_sleep=say,
            reraise=True,
        )
        try:
            answer = retrying(getattr(self._files, method), *arguments, **options)
        except Exception as error:  # each store has errors of its own for its networks
            if isinstance(error, FileNotFoundError) and absent is not _RAISE:
                answer = absent
            elif is_refusal(error):
                raise build_store_error(self.address, error) from error
            elif is_disk_full(error):
                raise
            else:
                seconds = round(time.monotonic() - began)
                raise StoreUnreachableError(self.address, get_first_line(error), seconds) from error
        if retrying.statistics["attempt_number"] > 1:
            seconds = round(time.monotonic() - began)
            self._say(f"continues: {self.address} answers again after {seconds} s")
        return answer


def _group_by_marker(names: Iterable[str]) -> list[list[str]]:
    """Return all other names, then the markers of checkpoints; no group is empty."""
    groups: tuple[list[str], list[str]] = ([], [])
    for name in names:
        groups[is_marker(name)].append(name)
    return [group for group in groups if group]
