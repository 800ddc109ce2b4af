"""Jobs of Slurm, by `sbatch`: a Ray cluster over the nodes of each.

Each attempt has a folder that all nodes share:

    <folder>/job.sbatch   the script
             id           of the job: written by whoever submits
             begun        the same: written by the job itself, in case that was killed in between
             pid          of the sweep, on the job's first node
             end          exit status of the sweep
             log.txt      what the job has printed
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gdpo_tune.clusters.backends import batch_script, programs
from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS, Job, Look
from gdpo_tune.clusters.backends.batch_script import Batch
from gdpo_tune.clusters.backends.job_folders import check_folder, folder_of, reason
from gdpo_tune.clusters.backends.programs import Answer
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import SlurmBackend
from gdpo_tune.clusters.shapes import BatchJob, Shape
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.files import write_whole

OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""States of a job that is over. Slurm says for a few minutes after the end that one is."""
AWAY = ("unable to contact slurm controller", "connection refused", "timed out")
"""In what Slurm's commands say when its controller is not there."""
UNKNOWN = "invalid job id"
"""The same, of a job that ended a while ago."""


def backend(sweep: ScheduledSweep) -> Slurm:
    """The backend of a sweep."""
    settings = sweep.settings.backend
    assert isinstance(settings, SlurmBackend), settings.kind
    return Slurm(sweep, settings, folder_of(sweep, settings.folder))


@dataclass(frozen=True)
class Slurm:
    """The batch jobs of one cluster; a folder for each."""

    kind: ClassVar[str] = "slurm"
    job_shape: ClassVar[type[Shape]] = BatchJob
    sweep: ScheduledSweep
    settings: SlurmBackend
    folder: Path
    call: Callable[[str, Sequence[str], str], Answer] = programs.call

    def check(self) -> None:
        """Ask whether Slurm's controller is there.

        Raises:
            BackendError: there is no Slurm here, or no folder for jobs.
            BackendUnreachableError: it does not answer.
        """
        answer = self._slurm("scontrol", "ping")
        if answer.status != 0:
            raise unreachable(answer)
        check_folder(self.folder, "backend slurm")

    def submit(self, job: Job) -> dict[str, Any]:
        """Submit a job, unless it was submitted before."""
        folder = self.folder / job.id
        known = self._known(folder) or self._queued(job.id)
        if known:
            return {"id": known, "folder": str(folder)}
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "job.sbatch"
        write_whole(script, self._script(job, folder))
        answer = self._slurm("sbatch", "--parsable", str(script))
        refuse(answer)
        known = answer.out.strip().partition(";")[0]  # `id;cluster` where there are several
        write_whole(folder / "id", known)
        return {"id": known, "folder": str(folder)}

    def look(self, job: dict[str, Any]) -> Look:
        """See how a job does: by the file that it leaves, else by what Slurm says of it."""
        folder, words = Path(job["folder"]), ("--jobs", job["id"], "--states", "all")
        answer = self._slurm("squeue", *words, "--noheader", "--format", "%T")
        gone = UNKNOWN in answer.words.lower() or (answer.status == 0 and not answer.out.strip())
        if not gone:
            refuse(answer)
        state = answer.out.strip().partition("\n")[0] if not gone else ""
        if state and state not in OVER:
            return Look(running=True)
        end = folder / "end"
        if end.exists() and (state in ("", "COMPLETED", "FAILED")):
            status = int(end.read_text())
            return Look(running=False, status=status, reason=reason(status, folder / "log.txt"))
        why = state.lower().replace("_", " ") or "Slurm does not know the job any more"
        return Look(running=False, reason=why)

    def stop(self, job: dict[str, Any], waited: float) -> None:
        """Tell the script, which tells the sweep, once; after a while cancel the job."""
        told = Path(job["folder"], "stop")
        pending = self._slurm("squeue", "--jobs", job["id"], "--noheader", "--format", "%T")
        if waited >= CHECKPOINT_SECONDS or pending.out.strip() == "PENDING":
            answer = self._slurm("scancel", job["id"])
        elif not told.exists():
            answer = self._slurm("scancel", "--batch", "--signal=TERM", job["id"])
        else:
            return
        if UNKNOWN not in answer.words.lower():
            refuse(answer)
        told.touch()

    def _known(self, folder: Path) -> str:
        found = [folder / name for name in ("id", "begun") if (folder / name).exists()]
        return found[0].read_text().strip() if found else ""

    def _queued(self, name: str) -> str:
        """Id of a job that was submitted by somebody who was killed before noting it."""
        answer = self._slurm("squeue", "--me", "--name", name, "--noheader", "--format", "%i")
        refuse(answer)
        return answer.out.strip().partition("\n")[0]

    def _script(self, job: Job, folder: Path) -> str:
        pid = shlex.quote(str(folder / "pid"))
        words = ["bash", "-c", f'echo "$$" >{pid} && exec "$@"', "gdpo-tune", *job.command()]
        end = shlex.quote(str(folder / "end"))
        about = Batch(
            name=job.id,
            log=str(folder / "log.txt"),
            command=[shlex.quote(word) for word in words],
            on_term=f'kill -TERM "$(cat {pid})"',
            alone=False,
            at_begin=f'rm -f {end}; echo "$SLURM_JOB_ID" >{shlex.quote(str(folder / "begun"))}',
            at_end=f'echo "$status" >{end}.part && mv {end}.part {end}',
        )
        return batch_script.script(self.settings, self.sweep, about, sys.executable, ())

    def _slurm(self, *words: str) -> Answer:
        return self.call("slurm", words, "")


def refuse(answer: Answer) -> None:
    """Raise what an answer means.

    Raises:
        BackendError: Slurm says no.
        BackendUnreachableError: its controller is away.
    """
    if answer.status == 0:
        return
    if any(words in answer.words.lower() for words in AWAY):
        raise unreachable(answer)
    raise BackendError(f"backend slurm: {answer.words}")


def unreachable(answer: Answer) -> BackendUnreachableError:
    """What to tell when Slurm's controller is away."""
    return BackendUnreachableError(f"backend slurm: the controller is away: {answer.words}")
