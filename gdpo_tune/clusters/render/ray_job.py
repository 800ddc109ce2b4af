"""A RayJob that runs a sweep once: for `kubectl create`, a pipeline, or a queue of Kueue."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render.base import RenderRequest, fill_template, refuse
from gdpo_tune.clusters.schedule_spec import KubeRayBackend
from gdpo_tune.core.object_store import is_url

FIRST_VERSION = (1, 2)
"""KubeRay's version with the last of the fields that are used: `backoffLimit`."""


def render(request: RenderRequest) -> dict[str, str]:
    """Render the manifest."""
    name = f"{request.sweep.name}.rayjob.yaml"
    return {name: request.fill("ray_job.yaml.jinja", name, name="", **list_values_here(request))}


def build_ray_job(
    sweep: ScheduledSweep, backend: KubeRayBackend, name: str, command: Sequence[str]
) -> str:
    """Return the RayJob of one attempt, which KubeRay does not repeat."""
    values = _list_values(backend, command, 0) | {"backend": backend, "sweep": sweep}
    values |= {"policy": sweep.settings.policy, "name": name}
    return fill_template("ray_job.yaml.jinja", request=None, **values)


def list_values_here(request: RenderRequest) -> dict[str, Any]:
    """Return the values of a RayJob whose driver keeps the schedule's state beside the sweep.

    KubeRay tries again only if the head was lost: a run that failed for good stays so.
    """
    command = request.build_command("python", "--here", "--once")
    retries = request.sweep.settings.policy.max_attempts - 1
    return _list_values(find_backend(request), command, retries)


def find_backend(request: RenderRequest) -> KubeRayBackend:
    """Return the KubeRay settings of a sweep."""
    backend = request.sweep.settings.backend
    if not isinstance(backend, KubeRayBackend):
        fix = "write backend: {kind: kuberay, image: ...}; cluster: names an existing RayCluster"
        refuse(request.sweep, "backend.kind", backend.kind, "pods need an image", fix)
    if request.kuberay < FIRST_VERSION:
        version = ".".join(map(str, request.kuberay))
        reason = f"KubeRay {version} does not know backoffLimit, which came with 1.2"
        refuse(request.sweep, "", "", reason, "install KubeRay 1.2 or later")
    return backend


def _list_values(backend: KubeRayBackend, command: Sequence[str], retries: int) -> dict[str, Any]:
    in_archive = is_url(backend.working_dir)
    change_directory = "" if in_archive else f"cd {shlex.quote(backend.working_dir)} && "
    entrypoint = change_directory + shlex.join(command)
    return {"entrypoint": entrypoint, "in_archive": in_archive, "retries": retries}
