"""A sweep as a job of a Ray cluster, from anywhere: `gdpo_tune.sweep SPACE --submit ADDRESS`.

The same command finds the job again while it runs, and resumes the sweep after it has ended.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gdpo_tune.clusters.backends import ray_jobs
from gdpo_tune.core import addresses
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from gdpo_tune.core.http import OUTAGE_SECONDS, build_retry
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import TRACKING_VARIABLES

T = TypeVar("T")
CALLER = "--submit"
METADATA_KEY = "gdpo_tune_sweep"
"""Key of a job's metadata, for the location of its sweep."""
POLL_SECONDS = 0.5
"""Interval between polls of a job that is followed."""
RETRY_SECONDS = 5.0
"""Interval between calls to a cluster that stopped answering while a job was followed."""


@dataclass(frozen=True)
class Submission:
    """A sweep for a cluster."""

    space: Path
    options: tuple[str, ...]
    """Options of `python -m gdpo_tune.sweep`, without the search space."""
    sweep: str
    storage: str
    """Its storage as the cluster sees it: an absolute path, or an address."""
    directory: Path
    """Directory that is sent."""


def build_jobs_api(address: str) -> ray_jobs.JobsApi:
    """Return the jobs of the cluster with a dashboard at this address."""
    token = addresses.find_ray_token(os.environ)
    return ray_jobs.JobsApi(address, token, CALLER, addresses.RAY_TOKEN_FIX)


def submit(submission: Submission, api: ray_jobs.JobsApi, *, follow: bool) -> int:
    """Run a sweep as a job, or find its job; return the exit status.

    With `follow` the job's log is printed until its end; otherwise the status is 0.

    Raises:
        BackendError: the directory cannot be sent, or the cluster refuses the job.
        BackendUnreachableError: the cluster does not answer.
    """
    from tenacity import retry_if_exception_message

    if follow and importlib.util.find_spec("aiohttp") is None:
        raise BackendError(
            f"{CALLER}: following a log needs aiohttp\n"
            "    fix: pip install 'gdpo-tune[cluster]', or add --detach"
        )
    space = ray_jobs.locate_space(submission.directory, submission.space, CALLER)
    words = ["python", "-m", "gdpo_tune.sweep", space, *submission.options]
    runtime_env = ray_jobs.build_runtime_env(submission.directory, submission.storage, CALLER)
    location = f"{submission.storage}/{submission.sweep}"
    name = api.ask(lambda client: find_active_job(client, location))
    if name is not None:
        print(f"{submission.sweep} is active already, as job {name}")
    else:
        name = f"{submission.sweep}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        job = {"submission_id": name, "metadata": {METADATA_KEY: location}}
        job |= {"entrypoint": shlex.join(words), "runtime_env": runtime_env}
        # a cluster that has just started has no agent to run it for some seconds
        no_agent = retry_if_exception_message(match=r"(?s).*No available agent")
        for attempt in build_retry(60.0, retry=no_agent, reraise=True):
            with attempt:
                api.ask(lambda client: client.submit_job(**job))
        print(f"submitted {submission.sweep} as job {name}")
    stop = shlex.join(["ray", "job", "stop", "--address", api.address, name])
    print(f"to stop it: {stop}", flush=True)
    if not follow:
        return 0
    try:
        return follow_job(api, name)
    except KeyboardInterrupt:
        fix = "run the same command to follow it again"
        print(f"The log is no longer followed. The job keeps running: {fix}.", file=sys.stderr)
        raise


def explain_lost_tracking(spec: SweepSpec) -> str:
    """Return why the tracking of a job on a cluster would be lost; empty if it would not."""
    uri, variable = spec.tracking.uri, TRACKING_VARIABLES["uri"]
    if spec.tracking.origins.get("uri") == variable:
        return f"{variable} of this machine does not reach the job"
    if not uri.startswith("sqlite:///") or uri.startswith("sqlite:////"):
        return ""
    return (
        f"tracking.uri = {uri} of the search space lies in the job's own directory on the cluster, "
        "which Ray deletes"
    )


def find_active_job(client: Any, location: str) -> str | None:
    """Return the job that works on a sweep; None if there is none."""
    for job in client.list_jobs():
        is_ours = (job.metadata or {}).get(METADATA_KEY) == location and job.submission_id
        if is_ours and str(job.status) not in ray_jobs.ENDED:
            return str(job.submission_id)
    return None


def follow_job(api: ray_jobs.JobsApi, name: str) -> int:
    """Print a job's log until it has ended; return its exit status, or 1 if that is unknown.

    Raises:
        BackendUnreachableError: the cluster has not answered for `OUTAGE_SECONDS`.
    """
    from tenacity import retry_if_exception_type

    def ask(call: Callable[[Any], T]) -> T:
        return retrying(lambda: api.ask(call))

    def announce(state: Any) -> None:
        if state.attempt_number == 1:
            print(f"waiting for the cluster: {state.outcome.exception()}", file=sys.stderr)

    unreachable = retry_if_exception_type(BackendUnreachableError)
    retrying = build_retry(
        OUTAGE_SECONDS, first=RETRY_SECONDS, retry=unreachable, before_sleep=announce, reraise=True
    )
    printed = 0
    while True:
        printed = _print_log(ask(lambda client: client), name, printed)
        status = ask(lambda client: ray_jobs.poll_job(client, name))
        if not status.running:
            if status.reason:
                print(f"the job ended: {status.reason}", file=sys.stderr)
            return 1 if status.exit_status is None else status.exit_status
        time.sleep(POLL_SECONDS)


def _print_log(client: Any, name: str, printed: int) -> int:
    """Print a log without its first `printed` characters; return how many are printed now."""
    import aiohttp

    received = 0

    async def print_parts() -> None:
        nonlocal received
        async for text in client.tail_job_logs(name):  # each connection sends it from its beginning
            print(text[max(0, printed - received) :], end="", flush=True)
            received += len(text)

    # Ray's errors are RuntimeErrors; the state of the job shows which case it is
    with suppress(aiohttp.ClientError, OSError, RuntimeError):
        asyncio.run(print_parts())
    return max(printed, received)
