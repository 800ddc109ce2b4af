"""What scheduled sweeps need of this machine: a storage, a backend that answers, variables."""

from __future__ import annotations

import os

from gdpo_tune.clusters.backends.base import build_backend
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.notify import webhook_problem
from gdpo_tune.clusters.schedule_spec import KubeRayBackend, RayJobBackend
from gdpo_tune.clusters.schedule_storage import ScheduleStorage
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.spec import SweepSpec


def find_errors(sweep: ScheduledSweep) -> list[GdpoTuneError]:
    """Return why a sweep could not run from this machine now: its storage and its backend."""
    checks = (
        lambda: ScheduleStorage(sweep.storage).check(),
        lambda: build_backend(sweep).check(),
    )
    errors: list[GdpoTuneError] = []
    for check in checks:
        try:
            check()
        except GdpoTuneError as error:
            errors.append(error)
    return errors


def find_warnings(sweep: ScheduledSweep) -> list[str]:
    """Return what is allowed but probably a mistake in an enabled sweep."""
    warnings: list[str] = []
    if not sweep.settings.enabled:
        return warnings
    notify, backend = sweep.settings.notify, sweep.settings.backend
    if notify is not None:
        problem = webhook_problem(os.environ.get(notify.webhook_env, ""))
        if problem:
            text = f"{notify.webhook_env} is {problem}, so no notification would be sent"
            warnings.append(f"{sweep.file}: {text}")
    lost = lost_tracking(sweep.spec)
    if lost and isinstance(backend, RayJobBackend | KubeRayBackend):
        warnings.append(f"{sweep.file}: {lost}; write tracking: and the URL of a server")
    return warnings


def lost_tracking(spec: SweepSpec) -> str:
    """Return why the tracking of a job on a cluster would be lost; empty if it would not."""
    uri = spec.tracking.uri
    if not uri.startswith("sqlite:///") or uri.startswith("sqlite:////"):
        return ""
    return (
        f"tracking.uri = {uri} of the search space lies in the job's own directory on the cluster, "
        "which Ray deletes"
    )
