"""Sweeps that a person names, read from where they are kept; nothing of them is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import is_file
from gdpo_tune.core.object_store import address_of, copied_from, is_url, local_folder
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore, fetch_spec
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import RUNS, SPEC
from gdpo_tune.spec.problems import one_of

PATIENCE = 20.0
"""Seconds for which whoever only reads a sweep waits for an object store that does not answer."""


@dataclass(frozen=True)
class Sweep:
    """A sweep on disk, as far as a choice needs it."""

    file: Path
    """Its resolved YAML."""
    place: str
    """The override that says where it is now."""
    spec: SweepSpec
    records: Sequence[TrialRecord]
    sessions: Sequence[Mapping[str, Any]] = ()
    """As `Ledger.sessions` has them."""

    def front(self) -> Front:
        """Return the front of its trials, on test prompts."""
        return build_front(self.records, self.spec.objective_list())

    def respecified(self, overrides: Sequence[str], *, to_run: bool) -> SweepSpec:
        """Its file with other values, for one training, or only to tell of one."""
        # One training learns from no earlier sweep, which may be gone.
        changes = [self.place, "search.warm_start=[]", *overrides]
        return load_spec(self.file, changes, self.file.parent.name, to_run=to_run)


def split_source(source: str, pick: str | None) -> tuple[str, str | None]:
    """Folder and choice of `FOLDER:WHICH`, or of `FOLDER` and `pick`; None without a choice."""
    folder, colon, which = source.rpartition(":")
    if which.startswith("//"):
        return source, pick  # the colon of an address
    if pick is None and is_url(source):
        return folder, which
    if pick is None and colon and folder and which and not is_file(_folder(source) / SPEC):
        return folder, which
    return source, pick


def sweep_file(folder: str, given: str) -> tuple[Path, str]:
    """The resolved file of a sweep, and the override that says where the sweep is now.

    Raises:
        UsageError: there is none; the message begins with `given`.
    """
    if is_url(folder):
        return stored_file(folder.rstrip("/"), given)
    path = _path(folder).absolute()
    if not is_file(path / SPEC):
        before, colon, after = folder.rpartition(":")
        if colon and is_file(_folder(before) / SPEC):
            raise UsageError(
                f"{given}: what to take is said once, behind a single colon or by --pick: leave "
                f"out :{after}"
            )
        told = f"{given}: there is no sweep in {folder}: it has no {SPEC}"
        stored = copied_from(path.name)
        fix = f"\n    fix: give its address: {one_of(stored)}" if stored else ""
        raise UsageError(told + fix)
    return path / SPEC, f"storage={json.dumps(str(path.parent))}"


def stored_file(address: str, given: str) -> tuple[Path, str]:
    """The same of a sweep on an object store, whose file is brought here."""
    folder = local_folder(address)
    if not fetch_spec(address, folder, patience=PATIENCE):
        raise UsageError(f"{given}: there is no sweep in {address}: it has no {SPEC}")
    return folder / SPEC, f"storage={json.dumps(address.rpartition('/')[0])}"


def read_sweep(folder: str, given: str, *, whole: bool = False) -> Sweep:
    """A sweep's file and records; nothing of it is changed.

    Args:
        folder: its folder, or its address.
        given: what the message of an error begins with.
        whole: whether more of it is wanted than its records, such as step metrics.

    Raises:
        UsageError: there is none; the message begins with `given`.
    """
    file, place = sweep_file(folder, given)
    spec = load_spec(file, [place], file.parent.name, to_run=False)
    if whole:
        bring_here(spec)
    with Ledger.open(spec, read_only=True) as ledger:
        return Sweep(file, place, ledger.spec, ledger.records(), ledger.sessions())


def find_sweep(named: str) -> Sweep:
    """A sweep by its folder, by its name under `runs`, or by the file that it was searched with.

    Raises:
        UsageError: there is none.
        SpecError: the file cannot be read.
    """
    is_spec = is_file(_path(named))
    place = load_spec(named, to_run=False).place if is_spec else place_named(named)
    return read_sweep(place, named, whole=True)


def bring_here(spec: SweepSpec) -> None:
    """Bring what pictures are drawn from onto this machine, if the sweep is on an object store."""
    if spec.address:
        SweepStore(spec, patience=PATIENCE).fetch()


def place_named(text: str) -> str:
    """The place that a person means: an address; a folder, or under `runs` where only that one has
    a sweep. The copy of a sweep on an object store stands for the sweep there."""
    if is_url(text):
        return text
    return address_of(_folder(text)) or str(_folder(text))


def _folder(text: str) -> Path:
    path, under = _path(text), Path(RUNS) / text
    return under if not is_file(path / SPEC) and is_file(under / SPEC) else path


def _path(text: str) -> Path:
    """A path as a person writes it; of a user who is not known, as it stands."""
    return Path(os.path.expanduser(text))
