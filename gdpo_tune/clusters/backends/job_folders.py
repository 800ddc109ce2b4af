"""Where a backend keeps scripts, logs and process ids of its jobs, on a disk of this machine, and
what a log says of the end of one."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.places import placed
from gdpo_tune.core.errors import BackendError

SAID = 300
"""At most so many characters of what a sweep said last are told."""


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


def reason(status: int, log: Path) -> str:
    """Why a sweep ended, for a person; empty if it succeeded."""
    if status == 0:
        return ""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}: {last_words(log)}"


def last_words(log: Path) -> str:
    """What stands last in a log: from the last `error:` on, or its last line."""
    if not log.exists():
        return "it printed nothing"
    text = log.read_text(errors="replace").strip()
    found = text[text.rfind("error:") :] if "error:" in text else text.rpartition("\n")[2]
    return " ".join(found[:SAID].split()) or "it printed nothing"
