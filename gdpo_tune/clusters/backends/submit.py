"""A sweep as a job of a Ray cluster, from anywhere: `gdpo_tune.sweep SPACE --submit ADDRESS`.

The same command finds the job again while it runs, and goes on with the sweep once it has ended.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.clusters.backends.jobs_api import UNDER_WAY, JobsApi, look, state_of
from gdpo_tune.clusters.backends.shipping import name_in, runtime_env
from gdpo_tune.core import ray_access
from gdpo_tune.core.errors import BackendError, BackendUnreachableError

WHO = "--submit"
OF = "gdpo_tune_sweep"
"""Key of a job's metadata: which sweep it works on."""
AGAIN_SECONDS = 5.0
"""Between two attempts to reach a cluster that stopped answering while a job was followed."""
PATIENCE = 600.0
"""Seconds for which a cluster that stopped answering is waited for."""


@dataclass(frozen=True)
class Submission:
    """What is to run on a cluster."""

    space: Path
    """The search space, here."""
    options: tuple[str, ...]
    """Of `python -m gdpo_tune.sweep`, besides the search space."""
    sweep: str
    """Name of the sweep."""
    storage: str
    """Where it is kept, as the cluster sees it: absolute, or an address."""
    folder: Path
    """What is sent."""


@dataclass
class Said:
    """What of a job's log has been shown; a log that is followed anew begins at its beginning."""

    write: Callable[[str], object]
    count: int = 0
    """Characters."""
    behind: int = field(default=0, init=False)

    def begin(self) -> None:
        """The log comes from its beginning again."""
        self.behind = 0

    def add(self, text: str) -> None:
        """Show what is new of the next part."""
        new = text[max(0, self.count - self.behind) :]
        self.behind += len(text)
        self.count = max(self.count, self.behind)
        self.write(new)


def cluster_at(address: str) -> JobsApi:
    """The jobs of the cluster whose dashboard has this address.

    Raises:
        BackendError: that is no address.
        UsageError: see `ray_access.token`.
    """
    fix = f"export {ray_access.FILE}=FILE with the cluster's token, or {ray_access.TOKEN}=..."
    return JobsApi(address, ray_access.token(os.environ), WHO, fix)


def submit(submission: Submission, api: JobsApi, *, follow: bool) -> int:
    """Run a sweep as a job, or find the one that does; return the exit status.

    Args:
        submission: what is to run.
        api: where.
        follow: whether to show the job's log until its end. Otherwise the status is 0.

    Raises:
        BackendError: it cannot be sent, or the cluster does not take it.
        BackendUnreachableError: the cluster does not answer.
    """
    if follow and importlib.util.find_spec("aiohttp") is None:
        raise BackendError(
            f"{WHO}: following a log needs aiohttp\n"
            "    fix: pip install 'gdpo-tune[cluster]', or add --detach"
        )
    request = request_for(submission)
    about = f"{submission.storage}/{submission.sweep}"
    name = api.ask(lambda client: running_job(client, about))
    if name is not None:
        print(f"{submission.sweep} is under way already, as job {name}")
    else:
        name = f"{submission.sweep}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        request |= {"submission_id": name, "metadata": {OF: about}}
        api.ask(lambda client: client.submit_job(**request))
        print(f"submitted {submission.sweep} as job {name}")
    stop = shlex.join(["ray", "job", "stop", "--address", api.address, name])
    print(f"to stop it: {stop}", flush=True)
    if not follow:
        return 0
    try:
        return followed(api, name)
    except KeyboardInterrupt:
        print(
            "Nobody follows the job any more, and it goes on. The same command follows it again.",
            file=sys.stderr,
        )
        raise


def running_job(client: Any, about: str) -> str | None:
    """The job that works on a sweep; None if there is none."""
    for job in client.list_jobs():
        ours = (job.metadata or {}).get(OF) == about and job.submission_id
        if ours and state_of(job) in UNDER_WAY:
            return str(job.submission_id)
    return None


def request_for(submission: Submission) -> dict[str, Any]:
    """What a job is to do, and what it needs for that.

    Raises:
        BackendError: the folder is not one to be sent, or the search space is not in it.
    """
    space = name_in(submission.folder, submission.space, WHO)
    words = ["python", "-m", "gdpo_tune.sweep", space, *submission.options]
    environment = runtime_env(submission.folder, submission.storage, WHO)
    return {"entrypoint": shlex.join(words), "runtime_env": environment}


def followed(
    api: JobsApi,
    name: str,
    write: Callable[[str], object] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show a job's log until it has ended; return its exit status, or 1 if nobody knows it.

    Raises:
        BackendUnreachableError: the cluster has not answered for `PATIENCE`.
    """
    said, missed = Said(write or show), 0.0
    while True:
        said.begin()
        try:
            tail(api.ask(lambda client: client), name, said)
            state = api.ask(lambda client: look(client, name))
        except BackendUnreachableError as error:
            if missed >= PATIENCE:
                raise
            if not missed:
                print(f"waiting for the cluster: {error}", file=sys.stderr)
            missed += AGAIN_SECONDS
        else:
            missed = 0.0
            if not state.running:
                if state.reason:
                    print(f"the job ended: {state.reason}", file=sys.stderr)
                return 1 if state.status is None else state.status
        sleep(AGAIN_SECONDS if missed else 0.5)


def tail(client: Any, name: str, said: Said) -> None:
    """Show a log as it grows, until it ends or breaks off: how the job does tells which."""

    import aiohttp

    async def take() -> None:
        async for text in client.tail_job_logs(name):
            said.add(text)

    # Ray's own are RuntimeErrors; whoever asks next for the job hears what it is
    with suppress(aiohttp.ClientError, OSError, RuntimeError):
        asyncio.run(take())


def show(text: str) -> None:
    """Part of a log on standard output."""
    print(text, end="", flush=True)
