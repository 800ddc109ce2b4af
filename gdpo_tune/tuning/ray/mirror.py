"""A trial's folder on an object store: brought to the node that trains it, and kept up to date.

A trial trains in a folder of its process alone, which begins empty and is deleted after it. So what
earlier attempts left on a node, or trials of an earlier sweep, is never taken for this one's.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

from gdpo_tune.core.checkpoint_names import (
    MARKER,
    by_steps,
    checkpoint_of,
    is_marker,
    markers_apart,
    step_of,
    whole_checkpoints,
)
from gdpo_tune.core.object_store import ObjectFolder, cache_folder
from gdpo_tune.core.processes import runs
from gdpo_tune.training.checkpoints import newest_valid_checkpoint

BEGUN = "begun"
"""File that says which trial of that number this is: there may have been another one, of a ledger
that is gone."""
KEPT = 2
"""Checkpoints of a running trial in the store, as on a disk."""


class Mirror:
    """The files of one trial, here and in the store, from where alone they count."""

    def __init__(self, files: ObjectFolder, folder: Path) -> None:
        """
        Args:
            files: the trial's folder in the store.
            folder: its folder here.
        """
        self._files = files
        self._folder = folder
        self._there: set[str] = set()
        """Names of all that is in the store."""
        self._same: dict[str, tuple[int, int]] = {}
        """Small files that are in the store as they are here: size and time of change."""

    def down(self, begun: str) -> None:
        """Bring here what the trial goes on from: its newest whole checkpoint and its small files.

        Args:
            begun: tells this trial from another one that had its number.

        Raises:
            StoreUnreachableError: the store does not answer, as in all that follows.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        sizes = self._files.sizes()
        if self._files.read(BEGUN) != begun.encode():
            self._delete(list(sizes))
            self._files.write(BEGUN, begun.encode())
            sizes = {}
        self._there = set(sizes)
        small = [name for name in sizes if checkpoint_of(name) is None and name != BEGUN]
        self._files.download({name: self._folder / name for name in small})
        self._same = {name: _state(self._folder / name) for name in small}
        for checkpoint in whole_checkpoints(sizes, self._files.read):
            names = [name for name in sizes if checkpoint_of(name) == checkpoint]
            self._files.download({name: self._folder / name for name in names})
            if newest_valid_checkpoint(self._folder) is not None:
                return  # else its digests are wrong, and the one before has to do

    def up(self) -> None:
        """Bring there what is new here, each checkpoint's marker last; drop older checkpoints."""
        self._up_small()
        for folder in self._folder.iterdir():
            if step_of(folder.name) is not None and f"{folder.name}/{MARKER}" not in self._there:
                self._up_checkpoint(folder)
        kept = by_steps([name for name in self._there if is_marker(name)])[:KEPT]
        self._delete([name for name in self._there if checkpoint_of(name) not in (None, *kept)])

    def _up_small(self) -> None:
        paths = [path for path in self._folder.iterdir() if path.is_file()]
        states = {path.name: _state(path) for path in paths if not path.name.startswith(".")}
        new = {name: state for name, state in states.items() if self._same.get(name) != state}
        self._files.upload({name: self._folder / name for name in new})
        self._same |= new
        self._there |= set(new)

    def _up_checkpoint(self, folder: Path) -> None:
        paths = {
            path.relative_to(self._folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
        markers, others = markers_apart(paths)
        for part in (others, markers):
            self._files.upload({name: paths[name] for name in part})
            self._there |= set(part)

    def _delete(self, names: list[str]) -> None:
        for part in markers_apart(names):
            self._files.delete(part)
            self._there -= set(part)


def own_folder() -> Path:
    """A new folder for what this process trains; those of processes that are gone are deleted."""
    me = psutil.Process()
    host = socket.gethostname()
    own = cache_folder() / "attempts" / f"{host}_{me.pid}_{me.create_time():.2f}"
    if own.parent.is_dir():
        for folder in own.parent.iterdir():
            there, _, process = folder.name.partition("_")
            pid, _, created = process.partition("_")
            if folder == own or (there == host and not runs(int(pid), float(created))):
                shutil.rmtree(folder, ignore_errors=True)
    own.mkdir(parents=True)
    return own


def _state(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
