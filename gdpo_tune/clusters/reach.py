"""What the files ask of this machine: variables that are set, storage, a backend that answers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gdpo_tune.clusters.backends.base import backend_of
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.notify import why_no_webhook
from gdpo_tune.clusters.schedule_spec import KubeRayBackend, RayJobBackend
from gdpo_tune.clusters.store import open_store
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.spec import SweepSpec


def problems(sweeps: Sequence[ScheduledSweep]) -> list[tuple[ScheduledSweep, GdpoTuneError]]:
    """Why sweeps could not run from this machine now: storage and backend of each."""
    found: list[tuple[ScheduledSweep, GdpoTuneError]] = []
    for sweep in sweeps:
        for check in (check_storage, check_backend):
            try:
                check(sweep)
            except GdpoTuneError as error:
                found.append((sweep, error))
    return found


def check_storage(sweep: ScheduledSweep) -> None:
    """The history can be kept.

    Raises:
        StoreError: it cannot.
    """
    open_store(sweep.storage).check()


def check_backend(sweep: ScheduledSweep) -> None:
    """Jobs would be taken.

    Raises:
        BackendError: they would not be.
        BackendUnreachableError: nothing answers.
    """
    backend_of(sweep).check()


def doubts(sweep: ScheduledSweep) -> list[str]:
    """What is allowed, and probably not meant, of a sweep that runs."""
    found: list[str] = []
    if not sweep.settings.enabled:
        return found
    notify = sweep.settings.notify
    if notify is not None and (why := why_no_webhook(os.environ.get(notify.webhook_env, ""))):
        found.append(f"{sweep.file}: {notify.webhook_env} is {why}, so nobody would be told")
    remote = isinstance(sweep.settings.backend, RayJobBackend | KubeRayBackend)
    lost = remote and lost_tracking(sweep.spec)
    if lost:
        found.append(f"{sweep.file}: {lost}; write tracking: and the URL of a server")
    return found


def lost_tracking(spec: SweepSpec) -> str:
    """Why nobody would see what a job tracks; empty if that is not so."""
    uri = spec.tracking.uri
    if not uri.startswith("sqlite:///") or uri.startswith("sqlite:////"):
        return ""
    return (
        f"tracking.uri = {uri} of the search space lies in the job's own folder on the cluster, "
        "which Ray deletes"
    )
