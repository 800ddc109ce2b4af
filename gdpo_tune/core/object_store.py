"""Folders of an object store, by an address that fsspec knows, and what to say when one is away.

Light: fsspec, and the package behind a scheme, are imported only where a store is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.files import is_disk_full
from gdpo_tune.core.outages import PATIENCE, attempts

T = TypeVar("T")

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
"""Scheme of an address -> the package that reads it."""
ON_DISK = ("file", "local")
"""Schemes of folders, which are to be made where an object store needs none."""
CACHE = "GDPO_TUNE_CACHE"
"""Environment variable: folder of this machine for work on sweeps that are kept elsewhere."""
LONGEST_WAIT = 30.0
"""Seconds between two attempts at most: stores slow down who asks too often."""


def is_url(storage: str) -> bool:
    """Whether storage is an object store, not a folder."""
    return URL.match(storage) is not None


def joined(address: str, *names: str) -> str:
    """An address below another one."""
    return "/".join([address.rstrip("/"), *names])


def cache_folder() -> Path:
    """Folder of this machine for work on sweeps that are kept elsewhere."""
    own = os.environ.get(CACHE)
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gdpo_tune"


def local_folder(address: str) -> Path:
    """Where this machine keeps what it has fetched from an address, or writes for it."""
    scheme, _, path = address.partition("://")
    return cache_folder().joinpath(scheme.lower(), *filter(None, path.split("/")))


def address_of(folder: Path) -> str:
    """The address that a folder of this machine is a copy of; empty if it is none."""
    try:
        scheme, *names = folder.absolute().relative_to(cache_folder()).parts
    except ValueError:
        return ""
    return f"{scheme}://{'/' if scheme in ON_DISK else ''}{'/'.join(names)}" if names else ""


def copied_from(name: str) -> list[str]:
    """Addresses of sweeps of this name that this machine has copies of."""
    found: list[str] = []
    for folder, below, files in os.walk(cache_folder()):
        if "spec.yaml" in files:
            below.clear()  # nothing below a sweep is one
            if os.path.basename(folder) == name:
                found.append(address_of(Path(folder)))
    return sorted(found)


def open_filesystem(place: str) -> tuple[Any, str]:
    """fsspec's filesystem for an address, and its path there without a `/` at the end.

    Raises:
        StoreError: the scheme is unknown, the package for it is not installed, or it cannot be
            used with nothing but an address.
    """
    import fsspec

    scheme = place.partition("://")[0].lower()
    options = {"auto_mkdir": True} if scheme in ON_DISK else {}
    try:
        # a cached listing would hide what others have written
        filesystem, root = fsspec.url_to_fs(place, use_listings_cache=False, **options)
    except Exception as error:  # each package has errors of its own, and some look for their server
        fix = f"pip install {PACKAGES[scheme]}" if scheme in PACKAGES else "write s3://, gs://"
        raise StoreError(f"storage {place}: {told(error)}\n    fix: {fix}") from error
    return filesystem, root.rstrip("/")


def told(error: BaseException) -> str:
    """What a store says, in one line."""
    words = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return words.strip().splitlines()[0]


def unusable(place: str, error: Exception) -> StoreError:
    """What to tell when nothing can be read or written at a place."""
    return StoreError(
        f"storage {place}: {told(error)}\n"
        "    fix: make it readable and writable, or write another storage"
    )


def nobody_listens(_: str) -> None:
    """For who need not be told that a store is away."""


class ObjectFolder:
    """Files below one address; names are relative to it, with `/` between folders.

    Every call is repeated while the store does not answer, for as long as asked. All of them may be
    repeated, since none adds to what is there.
    """

    def __init__(
        self,
        address: str,
        *,
        patience: float = PATIENCE,
        say: Callable[[str], None] = nobody_listens,
    ) -> None:
        """
        Args:
            address: of the folder; it need not exist.
            patience: seconds for which a store that does not answer is asked again.
            say: told once that it does not, and once that it does again.

        Raises:
            StoreError: the scheme is unknown, or the package for it is not installed.
        """
        self.address = address
        self._patience = patience
        self._say = say
        self._files, self._root = open_filesystem(address)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of every file below a folder, by name; empty where there is none.

        Raises:
            StoreUnreachableError: as every call here.
        """
        root = self._path(below) if below else self._root

        def find() -> dict[str, int]:
            try:
                found: Mapping[str, Any] = self._files.find(root, detail=True)
            except FileNotFoundError:
                return {}
            return {self._name(path): int(about["size"]) for path, about in found.items()}

        return self._retried(find)

    def read(self, name: str) -> bytes | None:
        """What a file contains; None where there is none."""

        def cat() -> bytes | None:
            try:
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

        return self._retried(cat)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        self._retried(lambda: self._files.pipe_file(self._path(name), content))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Write files of this machine, by the names that they get."""
        if files:
            there = [self._path(name) for name in files]
            here = [str(path) for path in files.values()]
            self._retried(lambda: self._files.put(here, there))

    def download(self, files: Mapping[str, Path]) -> None:
        """Bring files onto this machine; their folders are made."""
        if not files:
            return
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        there = [self._path(name) for name in files]
        here = [str(path) for path in files.values()]
        self._retried(lambda: self._files.get(there, here))

    def copy(self, names: Mapping[str, str]) -> None:
        """Copy files within the store: name of each -> name of its copy."""
        if names:
            here, there = map(self._path, names), map(self._path, names.values())
            pairs = list(here), list(there)
            self._retried(lambda: self._files.copy(*pairs))

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there is none."""
        paths = [self._path(name) for name in names]

        def remove() -> None:
            try:
                self._files.rm(paths)
            except FileNotFoundError:  # a repetition, of which some were gone
                for path in paths:
                    self._delete_one(path)

        if paths:
            self._retried(remove)

    def _delete_one(self, path: str) -> None:
        try:
            self._files.rm_file(path)
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _retried(self, call: Callable[[], T]) -> T:
        """The call's answer, however often it takes.

        Raises:
            StoreUnreachableError: there is none for as long as one was waited for.
            OSError: the disk of this machine is full.
        """
        away: Exception | None = None
        waited = 0.0
        for waited in attempts(self._patience, longest=LONGEST_WAIT):
            try:
                answer = call()
            except Exception as error:  # each store has errors of its own for its networks
                if is_disk_full(error):
                    raise
                if away is None and self._patience:
                    self._say(f"waits for {self.address}: {told(error)}")
                away = error
            else:
                if away is not None:
                    self._say(f"goes on: {self.address} answers again after {waited:.0f} s")
                return answer
        assert away is not None  # there is always a first attempt
        raise StoreUnreachableError(self.address, told(away), round(waited)) from away
