"""Files that are created once and whole, in a directory or in an object store.

`create` alone decides which of two processes was first. On a disk it is a hard link: it fails if
the name exists, and other processes see the file only once it is whole. Local disks and NFS
guarantee that. In an object store it is a conditional write (`If-None-Match: *` on S3), which s3fs,
gcsfs and adlfs support. `check` finds out whether a store ignores the condition.

Every method raises a `StoreError` if the storage cannot be used.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from gdpo_tune.core.errors import StoreError
from gdpo_tune.core.object_store import build_store_error, is_url, open_filesystem


class ScheduleStorage:
    """Files below a directory or an address; their names are relative to it, with `/`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._on_disk = not is_url(address)
        url = f"file://{os.path.abspath(address)}" if self._on_disk else address
        self._files, self._root = open_filesystem(url)

    def create(self, name: str, content: bytes) -> None:
        """Create a whole file; raise a `FileExistsError` if it exists already."""
        with self._explain_errors(FileExistsError):
            if self._on_disk:
                path = Path(self._get_path(name))
                path.parent.mkdir(parents=True, exist_ok=True)
                aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
                try:
                    with aside.open("xb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                    os.link(aside, path)
                finally:
                    aside.unlink(missing_ok=True)
            else:
                self._files.pipe_file(self._get_path(name), content, mode="create")

    def list_names(self, directory: str) -> list[str]:
        """Return the names of the files in a directory; an empty list if it does not exist."""
        with suppress(FileNotFoundError), self._explain_errors(FileNotFoundError):
            paths = self._files.ls(self._get_path(directory), detail=False)
            return sorted(str(path).rpartition("/")[2] for path in paths)
        return []

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._explain_errors():
            return self._files.cat_file(self._get_path(name))

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError), self._explain_errors(FileNotFoundError):
            self._files.rm_file(self._get_path(name))

    def check(self) -> None:
        """Refuse a storage in which files cannot be created, or can be created twice."""
        name = f".schedule/probe-{uuid.uuid4().hex}"
        self.create(name, b"")
        try:
            self.create(name, b"")
        except FileExistsError:
            return
        finally:
            self.delete(name)
        raise StoreError(
            f"storage {self.address}: a file can be created there twice, so two processes could "
            "start the same run\n    fix: use a store with conditional writes, such as S3"
        )

    def _get_path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _explain_errors(self, *expected: type[OSError]) -> Generator[None]:
        try:
            yield
        except expected:
            raise
        except Exception as error:  # each store has its own errors for credentials and networks
            raise build_store_error(self.address, error) from error
