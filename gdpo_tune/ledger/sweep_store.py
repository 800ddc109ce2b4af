"""A sweep on an object store, as the driver and its readers see it.

    <storage>/<name>/spec.yaml         the resolved spec, without passwords
                     ledger.journal    a copy of the ledger, written after every batch of records
                     trials/<number>/  a trial's directory, written by `tuning.ray.attempt`
                     stop              the trials that have to stop

Everything that must survive the loss of the driver's machine is here.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from gdpo_tune.core.errors import (
    GdpoTuneError,
    IdentityError,
    LedgerHeldError,
    StoreUnreachableError,
)
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.object_store import (
    JOURNAL,
    OUTAGE_SECONDS,
    READ_PATIENCE,
    SPEC,
    StoreDirectory,
    build_store_error,
)
from gdpo_tune.core.trial_files import MARKER, TRIALS, find_checkpoint_name, is_marker, may_differ
from gdpo_tune.core.trials import parse_step
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import dump_public_yaml

COPY = "ledger.copy"
"""File of this machine for reading a ledger that another one writes."""
print_notice = partial(print, file=sys.stderr)
"""Listener that prints on the terminal that a store does not answer, or answers again."""


def check_store_writable(address: str) -> None:
    """Refuse an address at which files cannot be written now, with a StoreError."""
    files, name = StoreDirectory(address, patience=0.0), f".probe-{uuid.uuid4().hex}"
    try:
        files.write(name, b"here")
        files.delete([name])
    except StoreUnreachableError as error:
        raise build_store_error(address, error.__cause__ or error) from error


def fetch_spec(address: str, directory: Path, *, patience: float = OUTAGE_SECONDS) -> bool:
    """Copy the resolved spec of a sweep to this machine; return whether there is one."""
    content = StoreDirectory(address, patience=patience, say=print_notice).read(SPEC)
    if content is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / SPEC, content)
    return content is not None


def download_ledger(address: str, directory: Path) -> Path:
    """Return the ledger to read: that of this machine, or the copy in the store if it has more."""
    path, copy = directory / JOURNAL, directory / COPY
    content = StoreDirectory(address, patience=READ_PATIENCE, say=print_notice).read(JOURNAL)
    if content is None or (path.exists() and path.stat().st_size >= len(content)):
        return path
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(copy, content)
    return copy


class LedgerCopy:
    """Copy of a ledger in the store of its sweep, from which another machine can go on."""

    def __init__(self, address: str, path: Path) -> None:
        """Replace the ledger at `path` by the copy if that has more records.

        Raises:
            IdentityError: each has records that the other one lacks.
        """
        self._files, self._path = StoreDirectory(address, say=print_notice), path
        self._failure: GdpoTuneError | None = None
        stored = self._files.read(JOURNAL)
        self._size = None if stored is None else len(stored)
        """Bytes of the copy as this process knows it."""
        own = path.read_bytes() if path.exists() else b""
        if stored is None or own.startswith(stored):
            return
        if not stored.startswith(own):
            raise IdentityError(
                f"two machines have continued this sweep: {address} and {path} each have records "
                "that the other lacks\n"
                f"    fix: remove {path.parent} to go on from there, or choose another --name"
            )
        write_atomically(path, stored)

    def write(self) -> None:
        """Write the copy; after a failure, raise it again at once.

        Raises:
            LedgerHeldError: another machine has written the copy meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if self._files.get_size(JOURNAL) != self._size:
                raise LedgerHeldError(
                    f"{self._files.address}: another machine runs this sweep now and has written "
                    "its ledger there; this process ends"
                )
            content = self._path.read_bytes()
            self._files.write(JOURNAL, content)
            self._size = len(content)
        except GdpoTuneError as error:
            self._failure = error
            raise


class SweepStore:
    """The directory of one sweep on an object store; all methods raise as `StoreDirectory` does."""

    def __init__(self, spec: SweepSpec, *, patience: float = OUTAGE_SECONDS) -> None:
        self._spec = spec
        self._copy = spec.directory.absolute()
        self._files = StoreDirectory(spec.address, patience=patience, say=print_notice)

    def write_spec(self) -> None:
        """Store the resolved spec, for readers that know only the address."""
        self._files.write(SPEC, dump_public_yaml(self._spec, stored=True).encode())

    def fetch(self) -> None:
        """Copy new small files to this machine; delete copies of checkpoints that are gone.

        Of a checkpoint only the marker is copied, which shows that it exists.
        """
        sizes = self._files.list_sizes(TRIALS)
        for path in self._copy.glob(f"{TRIALS}/*/*"):
            marker = f"{path.relative_to(self._copy).as_posix()}/{MARKER}"
            if parse_step(path.name) is not None and marker not in sizes:
                shutil.rmtree(path)
        small = [name for name in sizes if is_marker(name) or not find_checkpoint_name(name)]
        self._download_missing({name: self._copy / name for name in small}, sizes)

    def fetch_checkpoint(self, number: int, name: str, directory: Path) -> Path:
        """Copy a trial's checkpoint to `directory / name`, without what is there already."""
        prefix = f"{TRIALS}/{number}/{name}/"
        sizes = self._files.list_sizes(prefix.rstrip("/"))
        paths = {file: directory / name / file.removeprefix(prefix) for file in sizes}
        self._download_missing(paths, sizes)
        return directory / name

    def _download_missing(self, paths: Mapping[str, Path], sizes: Mapping[str, int]) -> None:
        self._files.download({n: path for n, path in paths.items() if may_differ(path, sizes[n])})

    def prune_checkpoints(self, checkpoints: Mapping[int, Collection[str]]) -> None:
        """Delete the checkpoints of trials, except some: number -> their names."""
        kept = {str(number): {None, *names} for number, names in checkpoints.items()}
        below = f"{TRIALS}/{next(iter(kept))}" if len(kept) == 1 else TRIALS
        trials = {name: name.split("/")[1] for name in self._files.list_sizes(below)}
        self._files.delete(
            name
            for name, trial in trials.items()
            if trial in kept and find_checkpoint_name(name) not in kept[trial]
        )

    def archive(self, name: str) -> None:
        """Move all files to another name of a sweep; a second call completes an interrupted one."""
        files = list(self._files.list_sizes())
        above = StoreDirectory(self._spec.storage, say=print_notice)
        above.copy({f"{self._spec.name}/{file}": f"{name}/{file}" for file in files})
        self._files.delete(files)
