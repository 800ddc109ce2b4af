"""Jobs of a Ray cluster, through its Jobs API. A job's submission id is the name of its attempt."""

from __future__ import annotations

import json
import os
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gdpo_tune.clusters.backends import Job, Look
from gdpo_tune.clusters.load import ScheduledSweep
from gdpo_tune.clusters.model import RayJobBackend
from gdpo_tune.clusters.places import placed
from gdpo_tune.clusters.store import is_url
from gdpo_tune.errors import BackendError, BackendUnreachableError
from gdpo_tune.service_url import split_service_url

T = TypeVar("T")
ANSWER_SECONDS = 10.0
"""How long the cluster may take to say that it is there."""
CALL_SECONDS = 300.0
"""How long a call may take: a submission sends the working folder along."""
EXISTS = "already exists"
"""In the message of the error, which has no type of its own, for a submission id that was used."""
NEVER_SENT = [".git", "__pycache__", "mlruns", "*.db"]


def backend(sweep: ScheduledSweep) -> RayJobs:
    """The backend of a sweep.

    Raises:
        BackendError: the variable for its address or its token is not set.
    """
    settings = sweep.settings.backend
    assert isinstance(settings, RayJobBackend), settings.kind
    address = settings.address or variable(settings.address_env, "address_env")
    token = variable(settings.token_env, "token_env")
    try:
        split_service_url(address)
    except ValueError as error:
        raise BackendError(
            f"backend ray-job: the address is not one of a dashboard: {error}\n"
            "    fix: write http://HOST:8265"
        ) from None
    folder = Path(placed(settings.working_dir, sweep.root))
    space = (sweep.root / sweep.settings.space).resolve().relative_to(folder.resolve())
    sent = {"working_dir": str(folder), "excludes": excludes(sweep.storage, folder)}
    return RayJobs(address.rstrip("/"), token, str(space), sent)


def variable(name: str | None, key: str) -> str:
    """The value of an environment variable; empty where none is named.

    Raises:
        BackendError: it is not set.
    """
    if name is None:
        return ""
    if not os.environ.get(name):
        raise BackendError(
            f"backend ray-job: {key} = {name}, and that variable is not set\n"
            f"    fix: export {name}=..., where this command runs"
        )
    return os.environ[name]


def excludes(storage: str, folder: Path) -> list[str]:
    """What is not sent along: sweeps that lie in the folder, and what is only of use here."""
    inside = not is_url(storage) and Path(storage).is_relative_to(folder)
    return [*NEVER_SENT, *([f"/{Path(storage).relative_to(folder)}"] if inside else [])]


@dataclass(frozen=True)
class RayJobs:
    """The jobs of one cluster."""

    kind: ClassVar[str] = "ray-job"
    address: str
    token: str
    """Empty: none is sent."""
    space: str
    """The search space, relative to the folder that is sent."""
    runtime_env: Mapping[str, Any]
    make_client: Callable[[str, Mapping[str, str]], Any] | None = None
    """For tests; None: Ray's own."""

    def check(self) -> None:
        """Ask the cluster for its version.

        Raises:
            BackendError: it asks for a token that it does not get, or is no Ray cluster.
            BackendUnreachableError: it does not answer.
        """
        request = urllib.request.Request(f"{self.address}/api/version", headers=self._headers())
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                json.loads(answer.read())["ray_version"]
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refused(error.code) from None
        except OSError as error:  # URLError and time-outs among them
            raise self._unreachable(getattr(error, "reason", error)) from None
        except (ValueError, KeyError, TypeError):
            raise BackendError(
                f"backend ray-job: {self.address} is not the dashboard of a Ray cluster\n"
                "    fix: write the dashboard's address, which has port 8265 by default"
            ) from None

    def submit(self, job: Job) -> dict[str, Any]:
        """Submit a job; one that is there already is as good."""
        _, *others = job.arguments
        words = ["python", "-m", "gdpo_tune.sweep", self.space, *others]

        def call() -> None:
            try:
                self._client().submit_job(
                    entrypoint=shlex.join(words),
                    submission_id=job.id,
                    runtime_env=dict(self.runtime_env),
                    metadata={"gdpo_tune_run": job.run},
                )
            except RuntimeError as error:
                if EXISTS not in str(error):
                    raise

        self._ask(call)
        return {"id": job.id}

    def look(self, job: dict[str, Any]) -> Look:
        """See how a job does. A cluster that was started anew does not know it any more."""

        def call() -> Look:
            try:
                info = self._client().get_job_info(job["id"])
            except RuntimeError as error:
                if "404" not in str(error):
                    raise
                return Look(running=False, reason="the cluster does not know the job any more")
            status = str(getattr(info.status, "value", info.status))
            if status in ("PENDING", "RUNNING"):
                return Look(running=True)
            if status == "SUCCEEDED":
                return Look(running=False, status=0)
            code = info.driver_exit_code
            words = " ".join((info.message or "").split())
            return Look(running=False, status=code, reason=f"{status.lower()}: {words}"[:500])

        return self._ask(call)

    def stop(self, job: dict[str, Any], waited: float) -> None:
        """Ask Ray to stop a job: SIGTERM, and after a few seconds of its own choice SIGKILL."""
        self._ask(lambda: self._client().stop_job(job["id"]))

    def _client(self) -> Any:
        if self.make_client is not None:
            return self.make_client(self.address, self._headers())
        from ray.job_submission import JobSubmissionClient

        return JobSubmissionClient(self.address, headers=self._headers())

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def _ask(self, call: Callable[[], T]) -> T:
        """The answer to a call of the client, which itself would wait for ever.

        Raises:
            BackendError: the cluster says no.
            BackendUnreachableError: it does not answer.
        """
        self.check()
        answers: list[T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                answers.append(call())
            except Exception as error:  # noqa: BLE001 - raised again in the thread that asks
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(CALL_SECONDS)
        if answers:
            return answers[0]
        if not errors:
            raise self._unreachable(f"no answer within {CALL_SECONDS:g} s")
        (error,) = errors
        if isinstance(error, OSError):  # requests' errors are of this kind
            raise self._unreachable(error) from error
        raise BackendError(f"backend ray-job: {self.address}: {str(error)[:500]}") from error

    def _refused(self, code: int) -> BackendError:
        if code in (401, 403) and not self.token:
            return BackendError(
                f"backend ray-job: {self.address} asks for a token ({code})\n"
                "    fix: write token_env: RAY_AUTH_TOKEN, and set that variable"
            )
        if code in (401, 403):
            return BackendError(
                f"backend ray-job: {self.address} does not take the token ({code})\n"
                "    fix: set the variable of token_env to the cluster's token"
            )
        return BackendError(f"backend ray-job: {self.address} answers {code} to /api/version")

    def _unreachable(self, reason: object) -> BackendUnreachableError:
        return BackendUnreachableError(
            f"backend ray-job: {self.address} does not answer ({reason})\n"
            "    fix: start the cluster, or mend the address"
        )
