"""What a backend asks of the rest of a file: that what it needs is there, and can be seen there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gdpo_tune.clusters.places import placed, why_no_dashboard, why_no_folder, why_no_label
from gdpo_tune.clusters.schedule_spec import (
    KubeRayBackend,
    LocalBackend,
    RayJobBackend,
    SlurmBackend,
    SweepFile,
)
from gdpo_tune.core.object_store import is_url

Fault = tuple[tuple[str, ...], str, str]
"""Key, reason, fix."""
LONGEST_RAY_JOB = 47
"""Characters that KubeRay lets a RayJob's name have."""
LONGEST_SCHEDULE = LONGEST_RAY_JOB - len("-20260329t010000z-a100")
"""What the time and the attempt leave of them."""


def problems(settings: SweepFile, project: Path) -> Iterator[Fault]:
    """Everything that keeps a backend from working with the rest of its file.

    Args:
        settings: what the file says.
        project: folder where its relative paths begin.
    """
    backend = settings.backend
    match backend:
        case LocalBackend():
            yield from _of_logs(settings, backend.folder, "folder of this machine")
        case RayJobBackend():
            yield from _of_ray_job(settings, backend, project)
        case KubeRayBackend():
            yield from _of_kuberay(settings, backend)
            yield from _of_image(settings, project)
        case SlurmBackend():
            yield from _of_logs(settings, backend.folder, "folder that all nodes share")
            yield from _of_slurm(backend)


def _of_logs(settings: SweepFile, folder: str, what: str) -> Iterator[Fault]:
    if is_url(settings.storage) and not folder:
        reason = "storage is an object store, which cannot hold logs that are being written"
        yield ("backend",), reason, f"write folder: a {what}"
    wrong = why_no_folder(folder)
    if wrong is not None:
        yield ("backend", "folder"), *wrong


def _of_ray_job(settings: SweepFile, backend: RayJobBackend, project: Path) -> Iterator[Fault]:
    if bool(backend.address) == bool(backend.address_env):
        both = "both address and address_env" if backend.address else "no address"
        fix = "write address: http://HOST:8265, or address_env: RAY_API_SERVER_ADDRESS"
        yield ("backend",), both, fix
    wrong = why_no_dashboard(backend.address) if backend.address else ""
    if wrong:
        yield ("backend", "address"), wrong, "write http://HOST:8265"
    nowhere = why_no_folder(backend.working_dir)
    if nowhere is not None:
        yield ("backend", "working_dir"), *nowhere
        return
    folder = Path(placed(backend.working_dir, project)).resolve()
    if not (project / settings.space).resolve().is_relative_to(folder):
        reason = f"the search space {settings.space} is not in it"
        yield ("backend", "working_dir"), reason, "write the folder that holds search_spaces/"


def _of_kuberay(settings: SweepFile, backend: KubeRayBackend) -> Iterator[Fault]:
    wrong = why_no_label(settings.name, LONGEST_SCHEDULE) if settings.name else None
    if wrong is not None:
        yield ("name",), *wrong
    if not is_url(settings.storage) and not settings.storage.startswith("/"):
        reason = "a folder of this machine, which no pod sees"
        yield ("storage",), reason, "write the path at which claim: is mounted, or s3://..."
    elif not is_url(settings.storage) and not backend.claim and not backend.cluster:
        reason = f"nothing is mounted at storage: {settings.storage}"
        yield ("backend",), reason, "write claim: and the name of a PersistentVolumeClaim"
    if is_url(settings.storage) and backend.claim:
        reason = "storage is an object store, so nothing would be mounted"
        yield ("backend", "claim"), reason, "remove it, or write a folder as storage"
    if not is_url(backend.working_dir) and not backend.working_dir.startswith("/"):
        reason = "neither a folder of the image nor an address"
        yield ("backend", "working_dir"), reason, "write it from / on, such as /srv/search"
    if backend.cluster and backend.queue:
        reason = "Kueue admits clusters, and cluster: names one that is there already"
        yield ("backend", "queue"), reason, "remove one of the two"
    if settings.storage == "/":
        yield ("storage",), "nothing can be mounted there", "write a folder of its own, /mnt/sweeps"


def _of_image(settings: SweepFile, project: Path) -> Iterator[Fault]:
    # by name, since links lead elsewhere in the image
    space = Path(os.path.normpath(project / settings.space))
    if Path(settings.space).is_absolute() or not space.is_relative_to(project):
        reason = "a file of this machine, which no pod sees"
        yield ("space",), reason, "write it relative to the folder that holds sweeps/"


def _of_slurm(backend: SlurmBackend) -> Iterator[Fault]:
    for option in backend.options:
        if not option.startswith("-") or "\n" in option:
            reason = f"{option!r} is no option of sbatch"
            yield ("backend", "options"), reason, "write them like --constraint=a100, one each"
