"""Jobs as processes of this machine, which keep running after their caller has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from gdpo_tune.clusters.backends import base, supervise
from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import LocalBackend
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.system import find_process

SILENT_SECONDS, WATCH_SECONDS = 8 * supervise.HEARTBEAT_SECONDS, 5 * supervise.HEARTBEAT_SECONDS
"""A job of another machine is watched after this time without a beat, and is dead if none comes
within the second: the file server's clock may have been set, and NFS be late by a minute."""


def build_local(sweep: ScheduledSweep, settings: LocalBackend) -> Local:
    """Build the backend of a sweep."""
    return Local(base.get_jobs_directory(sweep, settings.folder))


@dataclass(frozen=True)
class Local:
    """Processes of this machine, with a directory for each job."""

    kind: ClassVar[str] = "local"
    directory: Path

    def check(self) -> None:
        """Refuse a directory that cannot be written."""
        base.check_jobs_directory(self.directory, "local")

    def submit(self, job: ScheduledJob) -> JobHandle:
        """Start a process for a job, unless there was one."""
        directory = self.directory / job.id
        if not (directory / supervise.STATE).exists():
            about = {"command": job.build_command(sys.executable), "root": str(job.root)}
            try:
                directory.mkdir(parents=True, exist_ok=True)
                write_atomically(directory / supervise.JOB, json.dumps(about))
            except OSError as error:
                raise BackendError(f"backend local: {directory}: {error.strerror}") from error
            words = [sys.executable, "-m", "gdpo_tune.clusters.backends.supervise", str(directory)]
            silence = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            started = subprocess.run(words, check=False, **silence)
            if started.returncode or not (directory / supervise.STATE).exists():
                message = base.read_last_message(directory / supervise.LOG)
                raise BackendError(f"backend local: the process did not start: {message}")
        state = json.loads((directory / supervise.STATE).read_bytes())
        return JobHandle(backend=self.kind, id=job.id, directory=str(directory), **state)

    def poll(self, job: JobHandle) -> JobStatus:
        """Return whether a job's processes live, or how the sweep ended."""
        directory = Path(job.directory)
        if job.machine != socket.gethostname() and not directory.exists():
            raise BackendUnreachableError(
                f"backend local: {directory.name} runs on {job.machine}, and {directory} is not "
                "shared\n    fix: call tick on that machine"
            )
        if not (directory / supervise.END).exists() and _is_alive(job):
            return JobStatus(running=True)
        # NOTE: checked again, because it may have ended between the two checks.
        if not (directory / supervise.END).exists():
            return JobStatus(running=False, reason="its process is gone without an exit status")
        exit_status = json.loads((directory / supervise.END).read_bytes())["status"]
        return base.build_end_status(exit_status, directory / supervise.LOG)

    def stop(self, job: JobHandle, waited: float) -> None:
        """Send the sweep one SIGTERM; after `CHECKPOINT_SECONDS` kill it and all its children."""
        if job.machine != socket.gethostname():
            raise BackendUnreachableError(
                f"backend local: {Path(job.directory).name} runs on {job.machine}\n"
                "    fix: stop it on that machine"
            )
        with suppress(psutil.NoSuchProcess, FileExistsError):
            pid, start = job.processes[-1]
            # while the supervisor lives, its child keeps the pid, however the clock was set
            known = supervise.has_supervisor(Path(job.directory))
            sweep = psutil.Process(pid) if known else find_process(pid, start)
            if sweep is None:
                return
            if waited >= base.CHECKPOINT_SECONDS:
                for process in [*sweep.children(recursive=True), sweep]:
                    with suppress(psutil.NoSuchProcess):  # a child may just have ended
                        process.kill()
                return
            # a second signal would interrupt the writing of checkpoints
            os.close(os.open(Path(job.directory, base.STOP), os.O_CREAT | os.O_EXCL))
            sweep.send_signal(signal.SIGTERM)


def _is_alive(job: JobHandle) -> bool:
    if supervise.has_supervisor(Path(job.directory)):
        return True
    if job.machine == socket.gethostname():
        return any(find_process(pid, start) for pid, start in job.processes)
    beat = Path(job.directory, supervise.HEARTBEAT)
    now = beat.with_name(f".clock-{uuid.uuid4().hex}")
    now.touch()  # the clock of the disk, which both machines share
    try:
        last = beat.stat().st_mtime
        if now.stat().st_mtime - last < SILENT_SECONDS:
            return True
        time.sleep(WATCH_SECONDS)
        return beat.stat().st_mtime != last
    except FileNotFoundError:
        return False
    finally:
        now.unlink()
