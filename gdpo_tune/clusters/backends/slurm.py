"""Jobs of Slurm, by `sbatch`: each starts a Ray cluster on its nodes.

Each attempt has a directory that all nodes share:

    <directory>/job.sbatch  the script
                id          id of the job, such as `4711` or `4711;cluster`: written after `sbatch`
                begun       id of the job: written by the job, in case `sbatch`'s caller was killed
                unclear     what `sbatch` said, if that was not an id
                pid         pid of the sweep, on the job's first node
                end         exit status of the sweep
                log.txt     output of the job
                stop        created once the job was signalled or cancelled
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gdpo_tune.clusters.backends import base
from gdpo_tune.clusters.backends.base import JobStatus, ProgramResult, ScheduledJob, call_program
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render import build_job_script
from gdpo_tune.clusters.schedule_spec import SlurmBackend
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.files import write_atomically

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
"""States of a job that has ended. Slurm still reports them for a few minutes after the end."""
ACTIVE = (
    *("COMPLETING", "CONFIGURING", "EXPEDITING", "PENDING", "POWER_UP_NODE", "REQUEUED"),
    *("REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "RUNNING", "SIGNALING"),
    *("SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB"),
)
"""States of one that has not. Any other word says neither. Source: squeue(1), job state codes."""
UNREACHABLE = re.compile(
    r"unable to contact|connection|timed out|zero bytes|unexpected message", re.I
)
"""Part of the messages of Slurm's commands if its controller does not answer."""
ANYTHING = re.compile("")
UNKNOWN = "invalid job id"
"""Part of the message about a job that the controller has forgotten, or never had."""
ID = re.compile(r"^([0-9]+(?:;\S+)?)\s*$", re.MULTILINE)
"""A job, and its cluster if there are several, on a line of its own: the last one of what `sbatch
--parsable` prints. Sites print a welcome before it."""
STATE = re.compile(r"^([A-Z_]+)(?: by [0-9]+)?$", re.MULTILINE)
"""A state as squeue and sacct print it: the latter adds who has cancelled a job."""
CLUSTERS = re.compile(r"(?<!\S)(?:-M *|--clusters?[ =]+)[\"']?([^\s\"']+)")


@dataclass(frozen=True)
class Slurm:
    """The batch jobs of one cluster, or of those that the option `--clusters` names."""

    kind: ClassVar[str] = "slurm"
    sweep: ScheduledSweep
    settings: SlurmBackend
    call: Callable[[str, Sequence[str], str], ProgramResult] = call_program

    @property
    def directory(self) -> Path:
        """Directory of all jobs of the sweep."""
        return base.get_jobs_directory(self.sweep, self.settings.folder)

    def check(self) -> None:
        """Ask whether Slurm's controller answers."""
        self._call("scontrol", "ping").raise_unless_expected(self.kind, ANYTHING)
        base.check_jobs_directory(self.directory, "slurm")

    def submit(self, job: ScheduledJob) -> JobHandle:
        """Submit a job, unless it was submitted before."""
        directory = self.directory / job.id
        job_id, unclear = self._find_id(directory), directory / "unclear"
        if not job_id and not unclear.exists():
            directory.mkdir(parents=True, exist_ok=True)
            script = directory / "job.sbatch"
            job_words = (job.id, job.build_command(), directory)
            write_atomically(script, build_job_script(self.sweep, self.settings, *job_words))
            # by its name it is found again, and an option of the file must not give it another
            answer = self._call("sbatch", "--parsable", f"--job-name={job.id}", str(script))
            answer.raise_unless_expected(self.kind, UNREACHABLE)
            job_id = "".join(ID.findall(answer.out)[-1:])
            write_atomically(directory / "id" if job_id else unclear, job_id or answer.message)
        if not job_id:
            raise BackendUnreachableError(
                f"backend slurm: whether {job.id} was submitted is unknown: sbatch printed no id, "
                f"but {unclear.read_text()!r}\n    fix: write the id that squeue shows into "
                f"{directory / 'id'}; if there is no such job, delete {unclear}"
            )
        return JobHandle(backend=self.kind, id=job_id, directory=str(directory))

    def poll(self, job: JobHandle) -> JobStatus:
        """Return the state of a job, by what Slurm says and the file that it leaves."""
        end, state = Path(job.directory, "end"), self._read_state(job)
        if state in ACTIVE:
            return JobStatus(running=True)
        if not state:
            with suppress(BackendError, BackendUnreachableError):  # a site may have no accounting
                said = self._ask(job, "sacct", "--allocations", "--parsable2", "--format=State")
                # a job whose end the accounting has missed stays RUNNING there: not among ENDED
                state = next(filter(ENDED.__contains__, STATE.findall(said)), "")
        status = end.read_text(errors="replace").strip() if end.exists() else ""  # by hand perhaps
        if status.isdecimal() and (state not in ENDED or state in ("COMPLETED", "FAILED")):
            return base.build_end_status(int(status), end.parent / "log.txt")
        if state in ENDED:
            return JobStatus(running=False, reason=state.lower().replace("_", " "))
        said, way = state or "neither squeue nor sacct knows it", f"echo 1 >{shlex.quote(str(end))}"
        return JobStatus(True, reason=base.explain_unknown(f"Slurm's job {job.id}", said, way))

    def stop(self, job: JobHandle, waited: float) -> None:
        """Signal the script once, which stops the sweep; after a while cancel the job."""
        signalled, words = Path(job.directory, base.STOP), list[str]()
        if waited < base.CHECKPOINT_SECONDS and self._read_state(job) != "PENDING":
            if signalled.exists():
                return
            words = ["--batch", "--signal=TERM"]
        number, *cluster = self._locate(job)
        answer = self._call("scancel", *cluster, *words, number)
        answer.raise_unless_expected(self.kind, UNREACHABLE, UNKNOWN)
        signalled.touch()

    @property
    def _clusters(self) -> str:
        found = CLUSTERS.search(" ".join(self.settings.options))
        return found[1] if found else ""

    def _locate(self, job: JobHandle) -> list[str]:  # its number, and perhaps an option
        number, _, cluster = "".join(ID.findall(job.id)[-1:]).partition(";")
        cluster = cluster or self._clusters
        return [number, f"--clusters={cluster}"] if cluster else [number]

    def _find_id(self, directory: Path) -> str:
        for file in (directory / "id", directory / "begun"):
            if file.exists() and (found := ID.findall(file.read_text())):
                return found[-1]
        # its caller may have been killed before it wrote the id; other projects may use the name
        for cluster in self._clusters.split(","):
            words = [f"--clusters={cluster}"] if cluster else []
            words += ["--me", "--states=all", "--format=%i %o"]
            for line in self._query("squeue", directory.name, *words).split("\n"):
                number, _, script = line.partition(" ")
                if os.path.realpath(script) == os.path.realpath(directory / "job.sbatch"):
                    return f"{number};{cluster}" if cluster else number
        return ""

    def _read_state(self, job: JobHandle) -> str:
        """Return a job's state as squeue says it; empty if it does not know the job."""
        words = ("squeue", "--states=all", "--format=%T")
        said = self._ask(job, *words)
        if said == "REVOKED":  # another cluster of the federation has started it
            said = self._ask(job, *words, "--federation")
        return "".join(STATE.findall(said)[-1:]) or said

    def _ask(self, job: JobHandle, program: str, *words: str) -> str:
        number, *cluster = self._locate(job)
        name = Path(job.directory).name  # asked for too: numbers begin again one day
        return self._query(program, name, *cluster, "--jobs", number, *words)

    def _query(self, program: str, name: str, *words: str) -> str:
        """Return what a program prints about the jobs of a name; empty if it knows none."""
        answer = self._call(program, *words, f"--name={name}", "--noheader")
        answer.raise_unless_expected(self.kind, ANYTHING, UNKNOWN)
        return "" if answer.exit_status else answer.out.strip()

    def _call(self, *words: str) -> ProgramResult:
        return self.call("slurm", words, "")
