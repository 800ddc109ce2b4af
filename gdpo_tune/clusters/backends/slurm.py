"""Jobs of Slurm, by `sbatch`: each starts a Ray cluster on its nodes.

Each attempt has a directory that all nodes share:

    <directory>/job.sbatch  the script
                id          id of the job: written after `sbatch`
                begun       the same: written by the job, in case `sbatch`'s caller was killed
                pid         pid of the sweep, on the job's first node
                end         exit status of the sweep
                log.txt     output of the job
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gdpo_tune.clusters.backends import base
from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.outside_calls import ProgramAnswer, call_program
from gdpo_tune.clusters.render.batch_script import build_job_script
from gdpo_tune.clusters.schedule_spec import SlurmBackend
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.files import write_atomically

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of a job that has ended. Slurm still reports them for a few minutes after the end."""
AWAY = re.compile(r"unable to contact slurm controller|connection refused|timed out", re.IGNORECASE)
"""Part of the messages of Slurm's commands if its controller does not answer."""
ANYTHING = re.compile("")
UNKNOWN = "invalid job id"
"""Part of the message about a job that ended a while ago."""


@dataclass(frozen=True)
class Slurm:
    """The batch jobs of one cluster, with a directory for each."""

    kind: ClassVar[str] = "slurm"
    sweep: ScheduledSweep
    settings: SlurmBackend
    call: Callable[[str, Sequence[str], str], ProgramAnswer] = call_program

    @property
    def directory(self) -> Path:
        """Directory of all jobs of the sweep."""
        return base.get_jobs_directory(self.sweep, self.settings.folder)

    def check(self) -> None:
        """Ask whether Slurm's controller answers."""
        self._call("scontrol", "ping").raise_unless_expected(self.kind, ANYTHING)
        base.check_writable(self.directory, "slurm")

    def submit(self, job: ScheduledJob) -> JobHandle:
        """Submit a job, unless it was submitted before."""
        directory = self.directory / job.id
        job_id = self._find_id(directory, job.id)
        if not job_id:
            directory.mkdir(parents=True, exist_ok=True)
            script = directory / "job.sbatch"
            job_words = (job.id, job.build_command(), directory)
            write_atomically(script, build_job_script(self.sweep, self.settings, *job_words))
            answer = self._call("sbatch", "--parsable", str(script))
            answer.raise_unless_expected(self.kind, AWAY)
            job_id = answer.out.strip().partition(";")[0]  # `id;cluster` if there are several
            write_atomically(directory / "id", job_id)
        return JobHandle(backend=self.kind, id=job_id, directory=str(directory))

    def poll(self, job: JobHandle) -> JobStatus:
        """Return the state of a job, by the file that it leaves or by what Slurm says."""
        directory, words = Path(job.directory), ("--jobs", job.id, "--states", "all")
        state = self._ask_squeue("%T", *words)
        if state and state not in ENDED:
            return JobStatus(running=True)
        end = directory / "end"
        if end.exists() and state in ("", "COMPLETED", "FAILED"):
            return base.build_end_status(int(end.read_text()), directory / "log.txt")
        reason = state.lower().replace("_", " ") or "Slurm no longer knows the job"
        return JobStatus(running=False, reason=reason)

    def stop(self, job: JobHandle, waited: float) -> None:
        """Signal the script once, which stops the sweep; after a while cancel the job."""
        signalled = Path(job.directory, "stop")
        is_pending = self._ask_squeue("%T", "--jobs", job.id) == "PENDING"
        if waited >= base.CHECKPOINT_SECONDS or is_pending:
            answer = self._call("scancel", job.id)
        elif not signalled.exists():
            answer = self._call("scancel", "--batch", "--signal=TERM", job.id)
        else:
            return
        answer.raise_unless_expected(self.kind, AWAY, UNKNOWN)
        signalled.touch()

    def _find_id(self, directory: Path, name: str) -> str:
        """Return the id of a job that was submitted before; empty if it was not."""
        for file in (directory / "id", directory / "begun"):
            if file.exists() and (job_id := file.read_text().strip()):
                return job_id
        # its caller may have been killed before it wrote the id
        return self._ask_squeue("%i", "--me", "--name", name)

    def _ask_squeue(self, column: str, *words: str) -> str:
        """Return a column of the first job that `squeue` shows; empty if it shows none."""
        answer = self._call("squeue", *words, "--noheader", "--format", column)
        answer.raise_unless_expected(self.kind, AWAY, UNKNOWN)
        return answer.out.strip().partition("\n")[0]

    def _call(self, *words: str) -> ProgramAnswer:
        return self.call("slurm", words, "")
