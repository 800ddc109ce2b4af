"""The Jobs API of a Ray cluster, with time limits and errors that say how to fix a mistake."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gdpo_tune.clusters.backends.base import JobStatus
from gdpo_tune.clusters.locations import dashboard_problem
from gdpo_tune.clusters.outside_calls import call_within
from gdpo_tune.core.errors import BackendError, BackendUnreachableError

T = TypeVar("T")
ANSWER_SECONDS = 10.0
"""Longest time for the cluster's version."""
CALL_SECONDS = 300.0
"""Longest time for a call: a submission sends the working directory along."""
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that Ray's client prefers to the address that it is given."""
TOKEN = re.compile(r"[ -~]*")
NO_JOB = "404"
"""Part of the message of an untyped error: there is no such job."""
ACTIVE = ("PENDING", "RUNNING")
"""States of a job that has not ended."""
_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True)
class JobsApi:
    """The jobs of one cluster."""

    address: str
    """Address of its dashboard, such as `http://head:8265`."""
    token: str
    """Empty: none is sent."""
    caller: str
    """For messages: `backend ray-job`."""
    token_fix: str
    """How a user gives a token."""
    make_client: Callable[[str, Mapping[str, str]], Any] | None = None
    """For tests; None: Ray's own client."""

    def __post_init__(self) -> None:
        """Refuse an address or a token that cannot be used.

        Raises:
            BackendError: with the reason.
        """
        problem = dashboard_problem(self.address)
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
        """Ask the cluster for its version.

        Raises:
            BackendError: it does not take the token, or is not a Ray cluster.
            BackendUnreachableError: it does not answer.
        """
        try:
            json.loads(call_within(ANSWER_SECONDS, self._fetch_version))["ray_version"]
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refused(error.code) from None
        except OSError as error:  # URLError and time-outs among them
            raise self._unreachable(getattr(error, "reason", error)) from None
        except (http.client.HTTPException, ValueError, KeyError, TypeError):
            raise BackendError(
                f"{self.caller}: {self.address} is not the dashboard of a Ray cluster\n"
                "    fix: write the dashboard's address, which has port 8265 by default"
            ) from None

    def client(self) -> Any:
        """Build Ray's client for these jobs."""
        if self.make_client is not None:
            return self.make_client(self.address, self.headers())
        from ray.job_submission import JobSubmissionClient

        with _hide_variables(OVERRIDES):
            return JobSubmissionClient(self.address, headers=self.headers())

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers with the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ask(self, call: Callable[[Any], T]) -> T:
        """Return the result of a call with a client, which by itself would wait for ever.

        Raises:
            BackendError: the cluster refuses.
            BackendUnreachableError: it does not answer.
        """
        self.check()
        try:
            return call_within(CALL_SECONDS, lambda: call(self.client()))
        except ImportError as error:
            raise BackendError(
                f"{self.caller}: {error}\n    fix: pip install 'gdpo-tune[cluster]'"
            ) from error
        except OSError as error:  # errors of requests and time-outs are of this kind
            raise self._unreachable(error) from error
        except Exception as error:  # Ray's errors have no type of their own
            raise BackendError(f"{self.caller}: {self.address}: {str(error)[:500]}") from error

    def _unreachable(self, reason: object) -> BackendUnreachableError:
        return BackendUnreachableError(
            f"{self.caller}: {self.address} does not answer ({reason})\n"
            "    fix: start the cluster, or correct the address"
        )

    def _fetch_version(self) -> bytes:
        request = urllib.request.Request(f"{self.address}/api/version", headers=self.headers())
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.read()

    def _refused(self, code: int) -> BackendError:
        reason, fix = (
            f"answers {code} to /api/version",
            ("write the address of a Ray dashboard, or repair the proxy in front of it"),
        )
        if code in (401, 403):
            reason = f"{'does not take the token' if self.token else 'asks for a token'} ({code})"
            fix = self.token_fix
        return BackendError(f"{self.caller}: {self.address} {reason}\n    fix: {fix}")


def state_of(job: Any) -> str:
    """Return the state of a job of Ray's client."""
    return str(getattr(job.status, "value", job.status))


def poll_job(client: Any, name: str) -> JobStatus:
    """Return the state of a job, through Ray's client."""
    try:
        job = client.get_job_info(name)
    except RuntimeError as error:
        if NO_JOB not in str(error):
            raise
        return JobStatus(running=False, reason="the cluster does not know the job any more")
    state = state_of(job)
    if state in ACTIVE:
        return JobStatus(running=True)
    if state == "SUCCEEDED":
        return JobStatus(running=False, exit_status=0)
    message = " ".join((job.message or "").split())
    return JobStatus(False, job.driver_exit_code, f"{state.lower()}: {message}"[:500])


@contextmanager
def _hide_variables(names: tuple[str, ...]) -> Generator[None]:
    """Remove environment variables while a client is built."""
    with _ENVIRONMENT:
        hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(hidden)
