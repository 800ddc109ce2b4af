"""Jobs of a Ray cluster, as a schedule hands its runs to them: a job is named after its attempt."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gdpo_tune.clusters.backends.base import Job, Look
from gdpo_tune.clusters.backends.jobs_api import JobsApi, look
from gdpo_tune.clusters.backends.shipping import name_in, runtime_env
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.places import placed
from gdpo_tune.clusters.schedule_spec import RayJobBackend
from gdpo_tune.clusters.shapes import NamedJob, Shape
from gdpo_tune.core import ray_access
from gdpo_tune.core.errors import BackendError

WHO = "backend ray-job"
EXISTS = "already exists"
"""In the message of the error, which has no type of its own, for a submission id that was used."""


def backend(sweep: ScheduledSweep) -> RayJobs:
    """The backend of a sweep.

    Raises:
        BackendError: the variable for its address or its token is not set.
        UsageError: see `ray_access.token`.
    """
    settings = sweep.settings.backend
    assert isinstance(settings, RayJobBackend), settings.kind
    address = settings.address or variable(settings.address_env, "address_env")
    token = variable(settings.token_env, "token_env") or ray_access.token(os.environ)
    fix = "write token_env: and the name of a variable that holds the cluster's token"
    api = JobsApi(address, token, WHO, fix)
    folder = Path(placed(settings.working_dir, sweep.root))
    space = name_in(folder, sweep.root / sweep.settings.space, WHO)
    return RayJobs(api, space, runtime_env(folder, sweep.storage, WHO))


def variable(name: str | None, key: str) -> str:
    """The value of an environment variable; empty where none is named.

    Raises:
        BackendError: it is not set.
    """
    if name is None:
        return ""
    if not os.environ.get(name):
        raise BackendError(
            f"{WHO}: {key} = {name}, and that variable is not set\n"
            f"    fix: export {name}=..., where this command runs"
        )
    return os.environ[name]


@dataclass(frozen=True)
class RayJobs:
    """The jobs of one cluster, as what a schedule hands its runs to."""

    kind: ClassVar[str] = "ray-job"
    job_shape: ClassVar[type[Shape]] = NamedJob
    api: JobsApi
    space: str
    """The search space, relative to the folder that is sent."""
    runtime_env: Mapping[str, Any]

    def check(self) -> None:
        """Find out whether jobs would be taken."""
        self.api.check()

    def submit(self, job: Job) -> dict[str, Any]:
        """Submit a job; one that is there already is as good."""
        _, *others = job.arguments
        words = replace(job, arguments=(self.space, *others)).command()

        def call(client: Any) -> None:
            try:
                client.submit_job(
                    entrypoint=shlex.join(words),
                    submission_id=job.id,
                    runtime_env=dict(self.runtime_env),
                    metadata={"gdpo_tune_run": job.run},
                )
            except RuntimeError as error:
                if EXISTS not in str(error):
                    raise

        self.api.ask(call)
        return {"id": job.id}

    def look(self, job: dict[str, Any]) -> Look:
        """See how a job does. A cluster that was started anew does not know it any more."""
        return self.api.ask(lambda client: look(client, job["id"]))

    def stop(self, job: dict[str, Any], waited: float) -> None:
        """Ask Ray to stop a job: SIGTERM, and after a few seconds of its own choice SIGKILL."""
        self.api.ask(lambda client: client.stop_job(job["id"]))
