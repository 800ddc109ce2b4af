"""A sweep on an object store, as the driver and its readers see it.

    <storage>/<name>/spec.yaml         the resolved spec, without passwords
                     trials/<number>/  a trial's directory, written by `tuning.ray.remote_attempts`
                     stop              which trials have to stop

Everything that has to outlive the driver's machine is here or in the ledger. `fetch` copies what is
small to the sweep's directory on this machine. Of a checkpoint that is its marker, so the copy says
which checkpoints exist.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gdpo_tune.core.checkpoint_names import (
    MARKER,
    find_checkpoint_name,
    is_marker,
    iterate_whole_checkpoints,
    step_of,
)
from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.object_store import PATIENCE, StoreDirectory, unusable
from gdpo_tune.spec import SweepSpec, shown_yaml
from gdpo_tune.spec.model import SPEC

TRIALS = "trials"
print_notice = partial(print, file=sys.stderr)
"""Tells the person at the terminal that a store is away, or back."""


def check_writable(address: str) -> None:
    """Refuse, with a StoreError, an address at which files cannot be kept now."""
    files, name = StoreDirectory(address, patience=0.0), f".probe-{uuid.uuid4().hex}"
    try:
        files.write(name, b"here")
        files.delete([name])
    except StoreUnreachableError as error:
        raise unusable(address, error.__cause__ or error) from error


def fetch_spec(address: str, directory: Path, *, patience: float = PATIENCE) -> bool:
    """Copy the resolved file of a sweep to this machine; return whether there is one."""
    content = StoreDirectory(address, patience=patience, say=print_notice).read(SPEC)
    if content is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / SPEC, content)
    return content is not None


class SweepStore:
    """The directory of one sweep on an object store; all methods raise as `StoreDirectory` does."""

    def __init__(self, spec: SweepSpec, *, patience: float = PATIENCE) -> None:
        self._spec = spec
        self._copy = spec.directory.absolute()
        self._files = StoreDirectory(spec.address, patience=patience, say=print_notice)

    def write_spec(self) -> None:
        """Keep the resolved file, for readers who know nothing but the address."""
        self._files.write(SPEC, shown_yaml(self._spec).encode())

    def fetch(self) -> None:
        """Copy small files that are new to this machine; drop checkpoints that are gone there.

        Files of equal size are taken for equal: large ones only ever grow.
        """
        sizes = self._files.sizes(TRIALS)
        for path in self._copy.glob(f"{TRIALS}/*/*"):
            marker = f"{path.relative_to(self._copy).as_posix()}/{MARKER}"
            if step_of(path.name) is not None and marker not in sizes:
                shutil.rmtree(path)
        small = [name for name in sizes if is_marker(name) or not find_checkpoint_name(name)]
        paths = {name: self._copy / name for name in small}
        self._files.download(
            {n: p for n, p in paths.items() if not p.is_file() or p.stat().st_size != sizes[n]}
        )

    def keep_only(self, kept: Mapping[int, str | None]) -> None:
        """Delete checkpoints of trials: number -> name of the one that stays; None: none does."""
        stays = {str(number): checkpoint for number, checkpoint in kept.items()}
        below = f"{TRIALS}/{next(iter(stays))}" if len(stays) == 1 else TRIALS
        trials = {name: name.split("/")[1] for name in self._files.sizes(below)}
        self._files.delete(
            name
            for name, trial in trials.items()
            if trial in stays and find_checkpoint_name(name) not in (None, stays[trial])
        )

    def hand_over(self, donor: int, member: int) -> None:
        """Replace the checkpoints of a trial by the newest whole one of another trial."""
        self.keep_only({member: None})
        source, target = f"{TRIALS}/{donor}/", f"{TRIALS}/{member}/"
        donated = self._files.sizes(source)
        sizes = {name.removeprefix(source): size for name, size in donated.items()}
        whole = iterate_whole_checkpoints(sizes, lambda name: self._files.read(source + name))
        newest = next(whole, None)
        names = [name for name in sizes if newest and find_checkpoint_name(name) == newest]
        self._files.copy({source + name: target + name for name in names})

    def put(self, file: Path) -> None:
        """Keep a small file of the sweep's directory on this machine."""
        self._files.upload({file.relative_to(self._copy).as_posix(): file})

    def move_aside(self, name: str) -> None:
        """Move everything to another name of a sweep; after a move that was cut short, the rest."""
        files = list(self._files.sizes())
        above = StoreDirectory(self._spec.storage, say=print_notice)
        above.copy({f"{self._spec.name}/{file}": f"{name}/{file}" for file in files})
        self._files.delete(files)
