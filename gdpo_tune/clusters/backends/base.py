"""What runs the command of a sweep, by name, and what `tick` asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.shapes import Shape
from gdpo_tune.core import registry

CHECKPOINT_SECONDS = 120.0
"""That a sweep has for its checkpoints once it was asked to stop."""


@dataclass(frozen=True)
class Job:
    """One attempt at a run."""

    id: str
    """`<run>-a<attempt>`: submitting it twice is submitting it once."""
    run: str
    arguments: tuple[str, ...]
    """Of `python -m gdpo_tune.sweep`."""
    root: Path
    """Folder of the project, in which the command is to run."""

    def command(self, python: str = "python") -> list[str]:
        """The words that work on it; `python` is an interpreter of this package."""
        return [python, "-m", "gdpo_tune.sweep", *self.arguments]


@dataclass(frozen=True)
class Look:
    """What can be seen of a job."""

    running: bool
    status: int | None = None
    """Exit status of the command once it has ended; None if nobody saw it."""
    reason: str = ""
    """Why it ended, for a person, unless it succeeded."""


class Backend(Protocol):
    """Where jobs run. What it knows a job by is kept in the history, as JSON.

    Every method but `check` is idempotent, since who called it may be killed before that is
    written down. Each raises `BackendUnreachableError` where nothing answers.
    """

    kind: ClassVar[str]
    """Its name in `BACKENDS`."""
    job_shape: ClassVar[type[Shape]]
    """What it knows a job by."""

    def check(self) -> None:
        """Find out whether jobs would be taken.

        Raises:
            BackendError: they would not be.
            BackendUnreachableError: nothing answers.
        """
        ...

    def submit(self, job: Job) -> dict[str, Any]:
        """Let a job begin, unless it has already; return what to know it by.

        Raises:
            BackendError: it is not taken.
        """
        ...

    def look(self, job: dict[str, Any]) -> Look:
        """See how a job does."""
        ...

    def stop(self, job: dict[str, Any], waited: float) -> None:
        """Ask a job to end: Ctrl-C for the command, which then writes checkpoints.

        Args:
            job: what to know it by.
            waited: seconds since it was asked first.
        """
        ...


BACKENDS: dict[str, str] = {
    "local": "gdpo_tune.clusters.backends.local:backend",
    "ray-job": "gdpo_tune.clusters.backends.ray_jobs:backend",
    "kuberay": "gdpo_tune.clusters.backends.kuberay:backend",
    "slurm": "gdpo_tune.clusters.backends.slurm:backend",
}
"""Kind -> `module:function` that makes the backend of a sweep; `model.BACKEND_SETTINGS` has what
its file may say."""


def backend_of(sweep: ScheduledSweep) -> Backend:
    """The backend of a sweep.

    Raises:
        UsageError: something that it needs is not there, such as an environment variable.
    """
    return registry.load(BACKENDS[sweep.settings.backend.kind])(sweep)
