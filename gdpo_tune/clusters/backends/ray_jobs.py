"""Jobs of a Ray cluster, by its Jobs API, which gets time limits and clear errors here."""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob, explain_unknown
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import RayJobBackend, resolve_path
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core import addresses
from gdpo_tune.core.addresses import find_address_problem
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.http import run_with_timeout
from gdpo_tune.core.object_store import is_url

CALLER = "backend ray-job"
EXISTS = "already exists"
"""Part of the message of an untyped error: the submission id was used before."""


def build_ray_jobs(sweep: ScheduledSweep, settings: RayJobBackend) -> RayJobs:
    """Build the backend of a sweep.

    Raises:
        BackendError: the variable for its address or its token is not set.
        UsageError: see `addresses.find_ray_token`.
    """
    address = settings.address or _read_variable(settings.address_env, "address_env")
    token = _read_variable(settings.token_env, "token_env") or addresses.find_ray_token(os.environ)
    fix = "write token_env: and the name of a variable that holds the cluster's token"
    api = JobsApi(address, token, CALLER, fix)
    directory = Path(resolve_path(settings.working_dir, sweep.root))
    space = locate_space(directory, sweep.root / sweep.settings.space, CALLER)
    return RayJobs(api, space, build_runtime_env(directory, sweep.storage, CALLER))


@dataclass(frozen=True)
class RayJobs:
    """The jobs of one cluster for a schedule, each with the name of its attempt."""

    kind: ClassVar[str] = "ray-job"
    api: JobsApi
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
        return self.api.ask(lambda client: poll_job(client, job.id))

    def stop(self, job: JobHandle, waited: float) -> None:
        """Let Ray stop a job: by SIGTERM, and by SIGKILL after a few seconds."""
        self.api.ask(lambda client: client.stop_job(job.id))


def _read_variable(name: str | None, key: str) -> str:
    if name is None:
        return ""
    if not os.environ.get(name):
        raise BackendError(
            f"{CALLER}: {key} = {name}, and that variable is not set\n"
            f"    fix: export {name}=..., where this command runs"
        )
    return os.environ[name]


T = TypeVar("T")
ANSWER_SECONDS = 10.0
"""Longest time for the cluster's version."""
CALL_SECONDS = 300.0
"""Longest time for a call: a submission sends the working directory along."""
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that Ray's client prefers to the address that it is given."""
TOKEN = re.compile(r"[ -~]*")
ACTIVE, ENDED = ("PENDING", "RUNNING"), ("STOPPED", "SUCCEEDED", "FAILED")
"""States of a job that has not ended, and of one that has; any other word says neither."""
NEVER_SENT = [".git", ".schedule", "__pycache__", "mlruns", "*.db"]
"""Patterns of files that only this machine needs; those of `.gitignore` are not sent either."""
PACKAGE = Path(__file__).resolve().parents[2]
"""Directory of this package."""
_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True)
class JobsApi:
    """The jobs of one cluster.

    A refusal is a `BackendError`, no answer a `BackendUnreachableError`.
    """

    address: str
    """Address of its dashboard, such as `http://head:8265`."""
    token: str
    """Empty: none is sent."""
    caller: str
    """For messages: `backend ray-job`."""
    token_fix: str
    """How a user gives a token."""

    def __post_init__(self) -> None:
        """Raise a `BackendError` for an address or a token that cannot be used."""
        problem = find_address_problem(self.address)
        if problem:
            raise BackendError(
                f"{self.caller}: the address is not one of a dashboard: {problem}\n"
                "    fix: write http://HOST:8265"
            )
        if not TOKEN.fullmatch(self.token):
            raise BackendError(
                f"{self.caller}: the token has characters that cannot be sent, such as line "
                f"breaks\n    fix: {self.token_fix}"
            )
        object.__setattr__(self, "address", self.address.rstrip("/"))

    def check(self) -> None:
        """Ask the cluster for its version."""
        import httpx

        url, reason = f"{self.address}/api/version", ""
        fix = "write the dashboard's address, which has port 8265 by default"
        try:
            answer = run_with_timeout(
                ANSWER_SECONDS, lambda: httpx.get(url, headers=self.build_headers())
            )
            if answer.status_code in (401, 403):
                reason = "does not take the token" if self.token else "asks for a token"
                reason, fix = f"{reason} ({answer.status_code})", self.token_fix
            elif not answer.is_success:
                reason = f"answers {answer.status_code} to /api/version"
                fix = "write the address of a Ray dashboard, or repair the proxy in front of it"
            elif "ray_version" not in answer.json():
                raise ValueError
        except (OSError, httpx.NetworkError, httpx.TimeoutException) as error:
            raise self._build_unreachable_error(error) from None
        except (httpx.HTTPError, ValueError, TypeError):
            reason = "is not the dashboard of a Ray cluster"
        if reason:
            raise BackendError(f"{self.caller}: {self.address} {reason}\n    fix: {fix}")

    def build_client(self) -> Any:
        """Build Ray's client for these jobs."""
        from ray.job_submission import JobSubmissionClient

        with _ENVIRONMENT:
            hidden = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
            try:
                return JobSubmissionClient(self.address, headers=self.build_headers())
            finally:
                os.environ.update(hidden)

    def build_headers(self) -> dict[str, str]:
        """Return the HTTP headers with the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ask(self, call: Callable[[Any], T]) -> T:
        """Return the result of a call with a client, which by itself might wait for ever."""
        self.check()
        try:
            return run_with_timeout(CALL_SECONDS, lambda: call(self.build_client()))
        except ImportError as error:
            fix = "pip install 'gdpo-tune[cluster]'"
            raise BackendError(f"{self.caller}: {error}\n    fix: {fix}") from error
        except OSError as error:  # errors of requests and time-outs are of this kind
            raise self._build_unreachable_error(error) from error
        except Exception as error:  # Ray's errors have no type of their own
            # a proxy before the cluster: what the cluster has done is unknown
            if re.search(r"status code 50[234]", str(error)):
                raise self._build_unreachable_error(error) from error
            raise BackendError(f"{self.caller}: {self.address}: {str(error)[:500]}") from error

    def _build_unreachable_error(self, reason: object) -> BackendUnreachableError:
        return BackendUnreachableError(
            f"{self.caller}: {self.address} does not answer ({reason})\n"
            "    fix: start the cluster, or correct the address"
        )


def poll_job(client: Any, name: str) -> JobStatus:
    """Return the state of a job, through Ray's client."""
    try:
        job = client.get_job_info(name)
    except RuntimeError as error:
        if "status code 404" not in str(error):  # there is no such job
            raise
        return JobStatus(running=False, reason="the cluster no longer knows the job")
    state, message = str(job.status), " ".join((job.message or "").split())
    if state not in ENDED:
        reason = explain_unknown(f"job {name}", state, f"ray job delete {name}")
        return JobStatus(True, reason="" if state in ACTIVE else reason)
    if state == "SUCCEEDED":
        return JobStatus(running=False, exit_status=0)
    return JobStatus(False, job.driver_exit_code, f"{state.lower()}: {message}"[:500])


def build_runtime_env(directory: Path, storage: str, caller: str) -> dict[str, Any]:
    """Build the environment of a job whose working directory is a copy of `directory`.

    The package is sent along, whatever the cluster's image has; its requirements and the sweeps in
    `storage` are not.

    Raises:
        BackendError: the directory cannot or should not be sent.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise BackendError(f"{caller}: {directory} is not a directory that could be sent")
    if directory in (Path("/"), Path.home().resolve()):
        raise BackendError(
            f"{caller}: {directory} is not sent to a cluster: it holds far more than a project\n"
            "    fix: name the directory that holds the search space, or call from there"
        )
    code = {} if PACKAGE.is_relative_to(directory) else {"py_modules": [str(PACKAGE)]}
    return {
        "working_dir": str(directory),
        "excludes": list_excludes(storage, directory),
        "env_vars": {"PYTHONUNBUFFERED": "1"},  # so that the log can be followed
        **code,
    }


def list_excludes(storage: str, directory: Path) -> list[str]:
    """Return the patterns of files in `directory` that are not sent."""
    kept = None if is_url(storage) else Path(storage).resolve()
    if kept is None or kept == directory or not kept.is_relative_to(directory):
        return list(NEVER_SENT)  # in the directory itself no pattern tells sweeps from the rest
    return [*NEVER_SENT, f"/{kept.relative_to(directory)}"]


def locate_space(directory: Path, space: Path, caller: str) -> str:
    """Return the path of the search space in the directory that is sent; refuse one outside it."""
    try:
        return str(space.resolve().relative_to(directory.resolve()))
    except ValueError:
        raise BackendError(
            f"{caller}: the search space {space} is not in {directory}, which is sent\n"
            "    fix: name the directory that holds it"
        ) from None
