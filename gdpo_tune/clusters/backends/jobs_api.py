"""The Jobs API of a Ray cluster: asked with patience, and what to tell who asks wrongly."""

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

from gdpo_tune.clusters.backends.base import Look
from gdpo_tune.clusters.deadline import within
from gdpo_tune.clusters.places import why_no_dashboard
from gdpo_tune.core.errors import BackendError, BackendUnreachableError

T = TypeVar("T")
ANSWER_SECONDS = 10.0
"""How long the cluster may take to say that it is there."""
CALL_SECONDS = 300.0
"""How long a call may take: a submission sends the working folder along."""
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that Ray's client takes an address from, whatever address it is given."""
TOKEN = re.compile(r"[ -~]*")
"""What a token is made of."""
NO_JOB = "404"
"""In the message of the error, which has no type of its own, where there is no such job."""
UNDER_WAY = ("PENDING", "RUNNING")
"""States of a job that has not ended."""
_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True)
class JobsApi:
    """The jobs of one cluster."""

    address: str
    """Of its dashboard, such as `http://head:8265`."""
    token: str
    """Empty: none is sent."""
    who: str
    """What asks, for messages: `backend ray-job`."""
    token_fix: str
    """How a token is given to it."""
    make_client: Callable[[str, Mapping[str, str]], Any] | None = None
    """For tests; None: Ray's own."""

    def __post_init__(self) -> None:
        """
        Raises:
            BackendError: the address is not one of a dashboard, or the token is none.
        """
        wrong = why_no_dashboard(self.address)
        if wrong:
            raise BackendError(
                f"{self.who}: the address is not one of a dashboard: {wrong}\n"
                "    fix: write http://HOST:8265"
            )
        if not TOKEN.fullmatch(self.token):
            raise BackendError(
                f"{self.who}: the token has characters that cannot be sent, such as line breaks\n"
                f"    fix: {self.token_fix}"
            )
        object.__setattr__(self, "address", self.address.rstrip("/"))

    def check(self) -> None:
        """Ask the cluster for its version.

        Raises:
            BackendError: it asks for a token that it does not get, or is no Ray cluster.
            BackendUnreachableError: it does not answer.
        """
        try:
            json.loads(within(ANSWER_SECONDS, self._version))["ray_version"]
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refused(error.code) from None
        except OSError as error:  # URLError and time-outs among them
            raise self.unreachable(getattr(error, "reason", error)) from None
        except (http.client.HTTPException, ValueError, KeyError, TypeError):
            raise BackendError(
                f"{self.who}: {self.address} is not the dashboard of a Ray cluster\n"
                "    fix: write the dashboard's address, which has port 8265 by default"
            ) from None

    def client(self) -> Any:
        """A client of Ray's for these jobs."""
        if self.make_client is not None:
            return self.make_client(self.address, self.headers())
        from ray.job_submission import JobSubmissionClient

        with _without(OVERRIDES):
            return JobSubmissionClient(self.address, headers=self.headers())

    def headers(self) -> dict[str, str]:
        """What proves to the cluster who asks."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ask(self, call: Callable[[Any], T]) -> T:
        """The answer to a call with a client, which itself would wait for ever.

        Raises:
            BackendError: the cluster says no.
            BackendUnreachableError: it does not answer.
        """
        self.check()
        try:
            return within(CALL_SECONDS, lambda: call(self.client()))
        except ImportError as error:
            raise BackendError(
                f"{self.who}: {error}\n    fix: pip install 'gdpo-tune[cluster]'"
            ) from error
        except OSError as error:  # requests' errors, and time-outs, are of this kind
            raise self.unreachable(error) from error
        except Exception as error:  # Ray's have no type of their own
            raise BackendError(f"{self.who}: {self.address}: {str(error)[:500]}") from error

    def unreachable(self, reason: object) -> BackendUnreachableError:
        """What to tell when nothing answers."""
        return BackendUnreachableError(
            f"{self.who}: {self.address} does not answer ({reason})\n"
            "    fix: start the cluster, or mend the address"
        )

    def _version(self) -> bytes:
        request = urllib.request.Request(f"{self.address}/api/version", headers=self.headers())
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.read()

    def _refused(self, code: int) -> BackendError:
        if code in (401, 403):
            what = "does not take the token" if self.token else "asks for a token"
            return BackendError(
                f"{self.who}: {self.address} {what} ({code})\n    fix: {self.token_fix}"
            )
        return BackendError(
            f"{self.who}: {self.address} answers {code} to /api/version\n"
            "    fix: write the address of a Ray dashboard, or mend the proxy in front of it"
        )


def state_of(job: Any) -> str:
    """The state of a job that Ray's client tells of."""
    return str(getattr(job.status, "value", job.status))


def look(client: Any, name: str) -> Look:
    """How a job does, through a client of Ray's."""
    try:
        job = client.get_job_info(name)
    except RuntimeError as error:
        if NO_JOB not in str(error):
            raise
        return Look(running=False, reason="the cluster does not know the job any more")
    state = state_of(job)
    if state in UNDER_WAY:
        return Look(running=True)
    if state == "SUCCEEDED":
        return Look(running=False, status=0)
    words = " ".join((job.message or "").split())
    reason = f"{state.lower()}: {words}"[:500]
    return Look(running=False, status=job.driver_exit_code, reason=reason)


@contextmanager
def _without(names: tuple[str, ...]) -> Generator[None]:
    """The environment without some variables, for as long as it takes to make a client."""
    with _ENVIRONMENT:
        hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(hidden)
