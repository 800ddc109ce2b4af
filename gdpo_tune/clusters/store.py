"""A place where files are created once, whole, and never changed: a folder or an object store.

`create` is the only thing that decides who was first. On a disk it is a hard link, which fails
where the name exists and shows a file only once it is whole; local disks and NFS keep to that. On
an object store it is a write that asks for the name to be free (`If-None-Match: *` at S3), which
s3fs, gcsfs and adlfs pass on. A store that ignores the question is found out by `check`.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from gdpo_tune.core.errors import StoreError
from gdpo_tune.core.object_store import is_url, open_filesystem, unusable


class Store(ABC):
    """Files below one place; names are relative to it, with `/` between folders."""

    errors: ClassVar[type[Exception]]
    """What is raised where a place cannot be used."""

    def __init__(self, place: str) -> None:
        self.place = place

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Create a file, whole or not at all.

        Raises:
            FileExistsError: it is there already.
            StoreError: it cannot be written.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, without it; none where it does not exist.

        Raises:
            StoreError: it cannot be read.
        """

    @abstractmethod
    def read(self, names: Sequence[str]) -> list[bytes]:
        """What files contain.

        Raises:
            StoreError: one cannot be read.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file."""

    def check(self) -> None:
        """Find out whether files can be created here, and only once.

        Raises:
            StoreError: they cannot.
        """
        name = f".schedule/probe-{uuid.uuid4().hex}"
        self.create(name, b"")
        try:
            self.create(name, b"")
        except FileExistsError:
            return
        finally:
            self.delete(name)
        raise StoreError(
            f"storage {self.place}: a file can be created there twice, so two calls at once could "
            "start one run twice\n    fix: take a store with conditional writes, such as S3"
        )

    @contextmanager
    def _access(self, *expected: type[OSError]) -> Generator[None]:
        """Tell what is wrong with the place, but for errors that the caller deals with."""
        try:
            yield
        except expected:
            raise
        except self.errors as error:
            raise unusable(self.place, error) from error


def open_store(storage: str) -> Store:
    """The store that a folder or an address names.

    Raises:
        StoreError: its scheme is unknown, or the package for it is not installed.
    """
    return ObjectStore(storage) if is_url(storage) else FolderStore(storage)


class FolderStore(Store):
    """On a disk, local or shared."""

    errors = OSError

    def create(self, name: str, content: bytes) -> None:
        """See `Store`."""
        path = Path(self.place, name)
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with self._access():
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        try:
            with self._access(FileExistsError):
                os.link(aside, path)
        finally:
            aside.unlink()

    def names(self, folder: str) -> list[str]:
        """See `Store`."""
        path = Path(self.place, folder)
        with self._access():
            return sorted(entry.name for entry in os.scandir(path)) if path.is_dir() else []

    def read(self, names: Sequence[str]) -> list[bytes]:
        """See `Store`."""
        with self._access():
            return [Path(self.place, name).read_bytes() for name in names]

    def delete(self, name: str) -> None:
        """See `Store`."""
        with self._access():
            Path(self.place, name).unlink(missing_ok=True)


class ObjectStore(Store):
    """Behind an address that fsspec knows."""

    errors = Exception  # each store has errors of its own for credentials and networks

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self._files, self._root = open_filesystem(place)

    def create(self, name: str, content: bytes) -> None:
        """See `Store`."""
        with self._access(FileExistsError):
            self._files.pipe_file(self._path(name), content, mode="create")

    def names(self, folder: str) -> list[str]:
        """See `Store`."""
        try:
            with self._access(FileNotFoundError):
                found = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rpartition("/")[2] for path in found)

    def read(self, names: Sequence[str]) -> list[bytes]:
        """See `Store`."""
        paths = [self._path(name) for name in names]
        if not paths:
            return []
        with self._access():
            found = self._files.cat(paths)  # at once, where the store allows it
        if isinstance(found, bytes):
            return [found]
        return [found[path] for path in paths]

    def delete(self, name: str) -> None:
        """See `Store`."""
        with self._access():
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
