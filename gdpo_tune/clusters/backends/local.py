"""Jobs as processes of this machine, which outlive whoever submitted them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS, Job, Look
from gdpo_tune.clusters.backends.job_folders import check_folder, folder_of, last_words, reason
from gdpo_tune.clusters.backends.supervise import BEAT, BEAT_SECONDS, END, JOB, LOG, STATE
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import LocalBackend
from gdpo_tune.clusters.shapes import LocalJob, Shape
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.processes import process_of, runs

SILENT = 8 * BEAT_SECONDS
"""Seconds without a beat after which a job of another machine is taken to be dead."""


def backend(sweep: ScheduledSweep) -> Local:
    """The backend of a sweep."""
    settings = sweep.settings.backend
    assert isinstance(settings, LocalBackend), settings.kind
    return Local(folder_of(sweep, settings.folder))


def here(sweep: ScheduledSweep) -> Local:
    """The backend of a machine that another scheduler has given to a run of any backend.

    That scheduler calls again if it loses the machine, so a job of which nothing can be seen from
    here is gone.
    """
    passing = Path(tempfile.gettempdir(), "gdpo-tune", sweep.name)
    folder = passing if is_url(sweep.storage) else folder_of(sweep)
    return Local(folder, others_are_gone=True)


@dataclass(frozen=True)
class Local:
    """Processes of this machine; a folder for each job."""

    kind: ClassVar[str] = "local"
    job_shape: ClassVar[type[Shape]] = LocalJob
    folder: Path
    others_are_gone: bool = False
    """Whether jobs of other machines of which nothing can be seen are dead."""

    def check(self) -> None:
        """Whether there is a folder for jobs, or could be.

        Raises:
            BackendError: there cannot be.
        """
        check_folder(self.folder, "backend local")

    def submit(self, job: Job) -> dict[str, Any]:
        """Start a process for a job, unless there was one.

        Raises:
            BackendError: it cannot be started.
        """
        folder = self.folder / job.id
        about = {"command": job.command(sys.executable), "root": str(job.root)}
        if not (folder / STATE).exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / JOB, json.dumps(about))
            except OSError as error:
                raise BackendError(f"backend local: {folder}: {error.strerror}") from error
            started = subprocess.run(
                [sys.executable, "-m", "gdpo_tune.clusters.backends.supervise", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            if started.returncode or not (folder / STATE).exists():
                raise BackendError(
                    f"backend local: the process did not start: {last_words(folder / LOG)}"
                )
        return {"folder": str(folder), **json.loads((folder / STATE).read_bytes())}

    def look(self, job: dict[str, Any]) -> Look:
        """See whether a job's processes live, and how the sweep ended.

        Raises:
            BackendUnreachableError: it runs on another machine, whose folder is not shared.
        """
        folder = Path(job["folder"])
        if job["machine"] != socket.gethostname() and not folder.exists():
            if self.others_are_gone:
                return Look(running=False, reason=f"{job['machine']}, on which it ran, is gone")
            raise BackendUnreachableError(
                f"backend local: {folder.name} runs on {job['machine']}, and {folder} is not "
                "shared: tick there"
            )
        if not (folder / END).exists() and is_alive(job):
            return Look(running=True)
        # NOTE: looked for again: it may have ended between the two questions.
        if not (folder / END).exists():
            return Look(running=False, reason="its process is gone, and nobody saw its end")
        status = json.loads((folder / END).read_bytes())["status"]
        return Look(running=False, status=status, reason=reason(status, folder / LOG))

    def stop(self, job: dict[str, Any], waited: float) -> None:
        """Send the sweep what Ctrl-C sends; after a while, end all that the job has started.

        Raises:
            BackendUnreachableError: it runs on another machine.
        """
        if job["machine"] != socket.gethostname():
            raise BackendUnreachableError(
                f"backend local: {Path(job['folder']).name} runs on {job['machine']}: stop it there"
            )
        (_, _), (pid, created) = job["processes"]
        sweep = process_of(pid, created)
        if sweep is None:
            return
        with suppress(psutil.NoSuchProcess):
            if waited < CHECKPOINT_SECONDS:
                ask_once(sweep, Path(job["folder"]))
            else:
                for child in [*sweep.children(recursive=True), sweep]:
                    child.kill()


def ask_once(sweep: psutil.Process, folder: Path) -> None:
    """Send SIGTERM once: a second one would cut the writing of checkpoints short."""
    with suppress(FileExistsError):
        os.close(os.open(folder / "stop", os.O_CREAT | os.O_EXCL))
        sweep.send_signal(signal.SIGTERM)


def is_alive(job: dict[str, Any]) -> bool:
    """Whether something of a job lives; of another machine, whether it did two minutes ago."""
    if job["machine"] == socket.gethostname():
        return any(runs(pid, created) for pid, created in job["processes"])
    beat = Path(job["folder"], BEAT)
    ours = beat.with_name(f".clock-{uuid.uuid4().hex}")
    ours.touch()  # by the clock of the disk, which both machines share
    try:
        return ours.stat().st_mtime - beat.stat().st_mtime < SILENT
    except FileNotFoundError:
        return False
    finally:
        ours.unlink()
