"""Where a backend keeps scripts, logs and process ids of its jobs, on a disk of this machine."""

from __future__ import annotations

import uuid
from pathlib import Path

from gdpo_tune.clusters.load import ScheduledSweep
from gdpo_tune.clusters.places import placed
from gdpo_tune.errors import BackendError


def folder_of(sweep: ScheduledSweep, folder: str = "") -> Path:
    """The folder of a sweep's jobs: below the one that its file names, else beside its history."""
    if folder:
        return Path(placed(folder, sweep.root)) / sweep.name
    return Path(sweep.storage, ".schedule", sweep.name, "jobs")


def check_folder(folder: Path, who: str) -> None:
    """Make the folder, and find out whether it can be written.

    Raises:
        BackendError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BackendError(
            f"{who}: {folder}: {error.strerror}\n"
            "    fix: make it writable, or write folder: another one"
        ) from error
