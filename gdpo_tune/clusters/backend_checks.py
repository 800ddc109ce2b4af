"""Conflicts between a backend and the other keys of its file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from gdpo_tune.clusters.schedule_spec import (
    KubeRayBackend,
    LocalBackend,
    RayJobBackend,
    ScheduleSettings,
    SlurmBackend,
    resolve_path,
)
from gdpo_tune.core.addresses import find_address_problem
from gdpo_tune.core.object_store import is_url

Fault = tuple[tuple[str, ...], str, str]
"""Key, reason, fix."""
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, which names of RayJobs must meet: RFC 1123 without a digit at the start."""
MANY = re.compile(r"(?<!\S)(-a|--ar|-W|--wait(?!-)|:(?!\S))")
"""Options of sbatch for an array, a heterogeneous job, and to stay until the job has ended."""
LONGEST_NAME = 47 - len("-20260329t010000z-a100")
"""Characters of a schedule's name: KubeRay allows 47 for a RayJob, time and attempt included."""


def find_backend_problems(settings: ScheduleSettings, project: Path) -> Iterator[Fault]:
    """Yield every conflict of a file's backend; relative paths begin in `project`."""
    backend = settings.backend
    match backend:
        case LocalBackend():
            yield from _check_log_directory(settings, backend.folder, "of this machine")
        case RayJobBackend():
            yield from _check_ray_job(settings, backend, project)
        case KubeRayBackend():
            yield from _check_kuberay(settings, backend)
            # links are not followed: the image has its own files
            space = Path(os.path.normpath(project / settings.space))
            if Path(settings.space).is_absolute() or not space.is_relative_to(project):
                fix = "write it relative to the directory that holds sweeps/"
                yield ("space",), "a file of this machine, which pods do not see", fix
        case SlurmBackend():
            yield from _check_log_directory(settings, backend.folder, "that all nodes share")
            for option in backend.options:
                fix = "write each option like --constraint=a100"
                if not option.startswith("-") or "\n" in option:
                    yield ("backend", "options"), f"{option!r} is not an option of sbatch", fix
                elif MANY.search(option):
                    reason = f"{option!r} makes several jobs, or waits: a run is one job of its own"
                    yield ("backend", "options"), reason, "remove it"


def _check_log_directory(settings: ScheduleSettings, directory: str, which: str) -> Iterator[Fault]:
    if is_url(settings.storage) and not directory:
        reason = "storage is an object store, which cannot hold growing logs"
        yield ("backend",), reason, f"write folder: and a directory {which}"


def _check_ray_job(
    settings: ScheduleSettings, backend: RayJobBackend, project: Path
) -> Iterator[Fault]:
    if bool(backend.address) == bool(backend.address_env):
        reason = "both address and address_env" if backend.address else "no address"
        fix = "write address: http://HOST:8265, or address_env: RAY_API_SERVER_ADDRESS"
        yield ("backend",), reason, fix
    reason = find_address_problem(backend.address) if backend.address else ""
    if reason:
        yield ("backend", "address"), reason, "write http://HOST:8265"
    directory = Path(resolve_path(backend.working_dir, project)).resolve()
    if not (project / settings.space).resolve().is_relative_to(directory):
        reason = f"the search space {settings.space} is not in it"
        yield ("backend", "working_dir"), reason, "write the directory that holds search_spaces/"


def _check_kuberay(settings: ScheduleSettings, backend: KubeRayBackend) -> Iterator[Fault]:
    name, storage = settings.name, settings.storage
    if name and (len(name) > LONGEST_NAME or not LABEL.fullmatch(name)):
        reason = "not a name of Kubernetes (RFC 1123)"
        if LABEL.fullmatch(name):
            reason = f"{len(name)} characters, too long for a name of Kubernetes here"
        rule = f"at most {LONGEST_NAME} lowercase letters, digits and '-'"
        yield ("name",), reason, f"write name: and {rule}, a letter first"
    if not is_url(storage) and not storage.startswith("/"):
        reason = "a directory of this machine, which pods do not see"
        yield ("storage",), reason, "write the path at which claim: is mounted, or s3://..."
    elif not is_url(storage) and not backend.claim and not backend.cluster:
        reason = f"nothing is mounted at storage: {storage}"
        yield ("backend",), reason, "write claim: and the name of a PersistentVolumeClaim"
    if is_url(storage) and backend.claim:
        reason = "storage is an object store, so nothing would be mounted"
        yield ("backend", "claim"), reason, "remove it, or write a directory as storage"
    if not is_url(backend.working_dir) and not backend.working_dir.startswith("/"):
        reason = "neither a directory of the image nor an address"
        yield ("backend", "working_dir"), reason, "write an absolute path, such as /srv/search"
    if backend.cluster and backend.queue:
        reason = "Kueue admits new clusters, and cluster: names an existing one"
        yield ("backend", "queue"), reason, "remove one of the two"
    if storage == "/":
        yield ("storage",), "nothing can be mounted there", "write a directory, such as /mnt/sweeps"
