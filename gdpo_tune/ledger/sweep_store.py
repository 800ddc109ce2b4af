"""A sweep on an object store, seen from the driver and from those who only read it.

    <storage>/<name>/spec.yaml         the resolved spec, without passwords
                     trials/<number>/  what `tuning.mirror` keeps of a trial's folder

Everything that has to outlive the driver's machine is here or in the ledger. `fetch` makes the
sweep's folder on this machine a copy of what is small; of a checkpoint that is its marker, so that
a folder here says that there is one there.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from gdpo_tune.core.checkpoint_names import (
    MARKER,
    checkpoint_of,
    is_small,
    markers_apart,
    step_of,
    whole_checkpoints,
)
from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.object_store import PATIENCE, ObjectFolder, unusable
from gdpo_tune.spec import SweepSpec, shown_yaml
from gdpo_tune.spec.model import SPEC

TRIALS = "trials"


def say_here(what: str) -> None:
    """Tell the person at the terminal that a store is away, or back."""
    print(what, file=sys.stderr)


def check_writable(address: str) -> None:
    """Find out whether files can be kept at an address, without waiting for a store that is away.

    Raises:
        StoreError: they cannot.
    """
    files, name = ObjectFolder(address, patience=0.0), f".probe-{uuid.uuid4().hex}"
    try:
        files.write(name, b"here")
        files.delete([name])
    except StoreUnreachableError as error:
        cause = error.__cause__
        raise unusable(address, cause if isinstance(cause, Exception) else error) from error


def fetch_spec(address: str, folder: Path, *, patience: float = PATIENCE) -> bool:
    """Bring the resolved file of a sweep into a folder of this machine; False if there is none.

    Args:
        address: of the sweep.
        folder: where its copies are here.
        patience: seconds for which a store that does not answer is asked again.
    """
    content = ObjectFolder(address, patience=patience, say=say_here).read(SPEC)
    if content is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SPEC, content)
    return content is not None


class SweepStore:
    """The folder of one sweep on an object store."""

    def __init__(self, spec: SweepSpec, *, patience: float = PATIENCE) -> None:
        """
        Args:
            spec: of a sweep that has an `address`.
            patience: seconds for which a store that does not answer is asked again.

        Raises:
            StoreError: the package for its scheme is not installed.
        """
        self._spec = spec
        self._here = spec.directory.absolute()
        self._files = ObjectFolder(spec.address, patience=patience, say=say_here)

    def write_spec(self) -> None:
        """Keep the resolved file, for those who name the sweep by its address."""
        self._files.write(SPEC, shown_yaml(self._spec).encode())

    def fetch(self) -> None:
        """Bring here what is small and not here yet, and drop checkpoints that are gone there.

        A file of the same size is taken for the same: the large ones only ever grow.
        """
        sizes = self._files.sizes(TRIALS)
        for folder in self._here.glob(f"{TRIALS}/*/*"):
            name = f"{folder.relative_to(self._here).as_posix()}/{MARKER}"
            if step_of(folder.name) is not None and name not in sizes:
                shutil.rmtree(folder)
        lacking = {
            name: self._here / name
            for name, size in sizes.items()
            if is_small(name) and _size(self._here / name) != size
        }
        self._files.download(lacking)

    def keep_only(self, kept: Mapping[int, str | None]) -> None:
        """Delete the checkpoints of trials but for one of each.

        Args:
            kept: number of a trial -> name of the folder of the one that stays; None: none does.
        """
        stays = {str(number): name for number, name in kept.items()}
        below = f"{TRIALS}/{next(iter(stays))}" if len(stays) == 1 else TRIALS
        found = [
            (name, name.split("/")[1], checkpoint_of(name)) for name in self._files.sizes(below)
        ]
        self._delete(
            [
                name
                for name, trial, checkpoint in found
                if trial in stays and checkpoint not in (None, stays[trial])
            ]
        )

    def hand_over(self, donor: int, member: int) -> None:
        """Give a trial the newest whole checkpoint of another one, and none but that."""
        self.keep_only({member: None})
        source, target = f"{TRIALS}/{donor}", f"{TRIALS}/{member}"
        found = self._files.sizes(source)
        sizes = {name.removeprefix(f"{source}/"): size for name, size in found.items()}
        whole = whole_checkpoints(sizes, lambda name: self._files.read(f"{source}/{name}"))
        newest = next(whole, None)
        names = [name for name in sizes if newest and checkpoint_of(name) == newest]
        markers, others = markers_apart(names)
        for part in (others, markers):
            self._files.copy({f"{source}/{name}": f"{target}/{name}" for name in part})

    def put(self, file: Path) -> None:
        """Keep a small file of the sweep's folder here."""
        self._files.upload({file.relative_to(self._here).as_posix(): file})

    def move_aside(self, name: str) -> None:
        """Move everything to another name of a sweep; nothing is lost of a move that was cut short,
        and the next one takes the rest."""
        names, own = self._files.sizes(), self._spec.name
        above = ObjectFolder(self._spec.storage, say=say_here)
        above.copy({f"{own}/{file}": f"{name}/{file}" for file in names})
        self._delete(list(names))

    def _delete(self, names: list[str]) -> None:
        """Delete files, markers first: what is left of a checkpoint without one is none."""
        for part in markers_apart(names):
            self._files.delete(part)


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    return path.stat().st_size if path.is_file() else -1
