"""Jobs of a Ray cluster for the runs of a schedule: each job has the name of its attempt."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gdpo_tune.clusters.backends import jobs_api
from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import RayJobBackend, resolve_path
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core import addresses
from gdpo_tune.core.errors import BackendError

CALLER = "backend ray-job"
EXISTS = "already exists"
"""Part of the message of an untyped error: the submission id was used before."""


def build_backend(sweep: ScheduledSweep, settings: RayJobBackend) -> RayJobs:
    """Build the backend of a sweep.

    Raises:
        BackendError: the variable for its address or its token is not set.
        UsageError: see `addresses.find_ray_token`.
    """
    address = settings.address or _read_variable(settings.address_env, "address_env")
    token = _read_variable(settings.token_env, "token_env") or addresses.find_ray_token(os.environ)
    fix = "write token_env: and the name of a variable that holds the cluster's token"
    api = jobs_api.JobsApi(address, token, CALLER, fix)
    directory = Path(resolve_path(settings.working_dir, sweep.root))
    space = jobs_api.locate_space(directory, sweep.root / sweep.settings.space, CALLER)
    return RayJobs(api, space, jobs_api.build_runtime_env(directory, sweep.storage, CALLER))


@dataclass(frozen=True)
class RayJobs:
    """The jobs of one cluster."""

    kind: ClassVar[str] = "ray-job"
    api: jobs_api.JobsApi
    space: str
    """The search space, relative to the directory that is sent."""
    runtime_env: Mapping[str, Any]

    def check(self) -> None:
        """See `JobsApi.check`."""
        self.api.check()

    def submit(self, job: ScheduledJob) -> JobHandle:
        """Submit a job, unless it exists."""
        _, *others = job.arguments
        words = replace(job, arguments=(self.space, *others)).build_command()

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
        return JobHandle(backend=self.kind, id=job.id)

    def poll(self, job: JobHandle) -> JobStatus:
        """Return the state of a job. A restarted cluster no longer knows it."""
        return self.api.ask(lambda client: jobs_api.poll_job(client, job.id))

    def stop(self, job: JobHandle, waited: float) -> None:
        """Let Ray stop a job: by SIGTERM, and by SIGKILL after a few seconds."""
        self.api.ask(lambda client: client.stop_job(job.id))


def _read_variable(name: str | None, key: str) -> str:
    """Return the value of an environment variable; empty if no variable is named."""
    if name is None:
        return ""
    if not os.environ.get(name):
        raise BackendError(
            f"{CALLER}: {key} = {name}, and that variable is not set\n"
            f"    fix: export {name}=..., where this command runs"
        )
    return os.environ[name]
