"""The backends by name, the methods that `tick` calls, and what backends share.

They share the directories of their jobs, and external programs with a timeout.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import resolve_path
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core import registry
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.files import find_write_problem

CHECKPOINT_SECONDS = 120.0
"""Time for a sweep's checkpoints after it was asked to stop."""
STOP = "stop"
"""File in a job's directory that exists once the sweep was asked to stop."""


@dataclass(frozen=True)
class ScheduledJob:
    """One attempt at a run."""

    id: str
    """`<run>-a<attempt>`: submitting it twice is the same as once."""
    run: str
    arguments: tuple[str, ...]
    """Arguments of `python -m gdpo_tune.sweep`."""
    root: Path
    """Directory of the project, in which the command runs."""

    def build_command(self, python: str = "python") -> list[str]:
        """Return the words of its command for an interpreter of this package."""
        return [python, "-m", "gdpo_tune.sweep", *self.arguments]


@dataclass(frozen=True)
class JobStatus:
    """State of a job."""

    running: bool
    """False only if the job is known to have ended."""
    exit_status: int | None = None
    """Exit status of the command once it has ended; None if it is unknown."""
    reason: str = ""
    """Why it failed or, if `running`, is unknown and what a person can do; otherwise empty."""


class Backend(Protocol):
    """Where jobs run.

    Every method except `check` is idempotent: its caller may be killed before the result is
    written. Each raises `BackendUnreachableError` if the backend does not answer.
    """

    kind: ClassVar[str]
    """Its name in `BACKENDS`."""

    def check(self) -> None:
        """Raise a `BackendError` with the reason if the backend would not take jobs."""

    def submit(self, job: ScheduledJob) -> JobHandle:
        """Start a job unless it was started before; raise a `BackendError` if it is refused."""
        ...

    def poll(self, job: JobHandle) -> JobStatus:
        """Return the state of a job."""
        ...

    def stop(self, job: JobHandle, waited: float) -> None:
        """Ask a job to end as by Ctrl-C, upon which the command writes checkpoints.

        `waited` is the number of seconds since the first request.
        """


BACKENDS: dict[str, str] = {
    "local": "gdpo_tune.clusters.backends.local_jobs:build_local",
    "ray-job": "gdpo_tune.clusters.backends.ray_jobs:build_ray_jobs",
    "kuberay": "gdpo_tune.clusters.backends.kuberay:KubeRay",
    "slurm": "gdpo_tune.clusters.backends.slurm:Slurm",
}
"""Kind -> `module:callable` that builds the backend from the sweep and its settings of that kind,
a class of `schedule_spec.BACKEND_SETTINGS`."""


def build_backend(sweep: ScheduledSweep) -> Backend:
    """Build the backend of a sweep; raise an error if a variable that it needs is not set."""
    settings = sweep.settings.backend
    return registry.load(BACKENDS[settings.kind])(sweep, settings)


def get_jobs_directory(sweep: ScheduledSweep, directory: str = "") -> Path:
    """Return the directory of a sweep's jobs: below the one of its file, or beside its state."""
    if directory:
        return Path(resolve_path(directory, sweep.root)) / sweep.name
    return sweep.state_directory / "jobs"


def check_jobs_directory(directory: Path, backend: str) -> None:
    """Raise a `BackendError` if a directory could not be made or written; make nothing."""
    if problem := find_write_problem(directory):
        raise BackendError(
            f"backend {backend}: {directory}: {problem}\n"
            "    fix: make it writable, or write folder: and another one"
        )


def build_end_status(exit_status: int, log: Path) -> JobStatus:
    """Return the status of a job whose sweep has ended and has written a log."""
    reason = f"exit status {exit_status}: {read_last_message(log)}" if exit_status else ""
    if exit_status < 0:
        reason = f"killed by {signal.Signals(-exit_status).name}"
    return JobStatus(False, exit_status, reason)


def explain_unknown(job: str, said: str, way: str) -> str:
    """Return the reason of a job that may run or not, with the command for one that has ended."""
    return f"the state of {job} is unknown ({said[:80]!r}); if it has ended, run: {way}"


def read_last_message(log: Path) -> str:
    """Return the last message in a log: from the last `error:` on, or its last line."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    message = text[text.rfind("error:") :] if "error:" in text else text.rpartition("\n")[2]
    return " ".join(message[:300].split()) or "it printed nothing"


PROGRAM_SECONDS = 60.0
"""Longest time that a program may take."""
SURROUNDING = re.compile(
    r"SLURM_(?!(CONF|JWT|CLUSTERS)$)|SBATCH_(?!(ACCOUNT|CLUSTERS|PARTITION|QOS|RESERVATION)$)"
    r"|(SRUN|SALLOC|SQUEUE|SACCT|SCANCEL|PMI|PMIX|OMPI|RAY_JOB)_|RAY_ADDRESS$"
)
"""Variables of the job in which this command may run, and such as filter what programs show.
sbatch(1) passes on every `SLURM_*`, whatever `--export` is, and srun(1) takes them for options."""


@dataclass(frozen=True)
class ProgramResult:
    """Exit status and output of a program."""

    exit_status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Its error message in one line."""
        return " ".join((self.err.strip() or self.out.strip()).split())[:500] or "no reason given"

    def raise_unless_expected(
        self, backend: str, away: re.Pattern[str], expected: str = ""
    ) -> None:
        """Raise an error unless it is expected; `BackendUnreachableError` if it matches `away`."""
        if self.exit_status == 0 or (expected and expected in self.message.lower()):
            return
        if away.search(self.message):
            raise BackendUnreachableError(
                f"backend {backend} does not answer: {self.message}\n"
                "    fix: start it, or correct how this machine reaches it"
            )
        raise BackendError(f"backend {backend}: {self.message}")


def call_program(backend: str, words: Sequence[str], text: str = "") -> ProgramResult:
    """Call a program for a backend, with `text` as its standard input, and wait for its end.

    Raises:
        BackendError: it does not exist, or cannot be run.
        BackendUnreachableError: it does not end in time.
    """
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROGRAM_SECONDS,
            check=False,
            env={name: os.environ[name] for name in os.environ if not SURROUNDING.match(name)},
        )
    except FileNotFoundError:
        raise BackendError(
            f"backend {backend}: there is no program {words[0]} here\n"
            "    fix: install it, or call this command on a machine that has it"
        ) from None
    except OSError as error:
        raise BackendError(
            f"backend {backend}: {words[0]} cannot be run ({error.strerror})\n"
            f"    fix: make {words[0]} on the PATH a program that can be run"
        ) from error
    except subprocess.TimeoutExpired:
        raise BackendUnreachableError(
            f"backend {backend}: {words[0]} gave no answer within {PROGRAM_SECONDS:g} s"
        ) from None
    return ProgramResult(done.returncode, done.stdout, done.stderr)
