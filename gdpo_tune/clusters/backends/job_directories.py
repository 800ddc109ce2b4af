"""Directories for scripts, logs and process ids of jobs, and why a job ended by its log."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.locations import resolve_path
from gdpo_tune.core.errors import BackendError

LONGEST_MESSAGE = 300
"""Characters of a sweep's last message that are shown."""


def jobs_directory(sweep: ScheduledSweep, directory: str = "") -> Path:
    """Return the directory of a sweep's jobs: below the one of its file, or beside its history."""
    if directory:
        return Path(resolve_path(directory, sweep.root)) / sweep.name
    return Path(sweep.storage, ".schedule", sweep.name, "jobs")


def check_writable(directory: Path, backend: str) -> None:
    """Create a directory and refuse it if it cannot be written.

    Raises:
        BackendError: with the reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BackendError(
            f"backend {backend}: {directory}: {error.strerror}\n"
            "    fix: make it writable, or write folder: and another one"
        ) from error


def describe_end(exit_status: int, log: Path) -> str:
    """Return why a sweep ended, for a person; empty if it succeeded."""
    if exit_status == 0:
        return ""
    if exit_status < 0:
        return f"killed by {signal.Signals(-exit_status).name}"
    return f"exit status {exit_status}: {read_last_message(log)}"


def read_last_message(log: Path) -> str:
    """Return the last message in a log: from the last `error:` on, or its last line."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    message = text[text.rfind("error:") :] if "error:" in text else text.rpartition("\n")[2]
    return " ".join(message[:LONGEST_MESSAGE].split()) or "it printed nothing"
