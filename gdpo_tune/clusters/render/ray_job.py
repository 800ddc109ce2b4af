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
    """Render the manifest.

    Raises:
        SpecError: the sweep has another backend.
    """
    values, name = list_values_here(request), f"{request.sweep.name}.rayjob.yaml"
    return {name: request.fill("ray_job.yaml.jinja", name, name="", **values)}


def build_ray_job(
    sweep: ScheduledSweep, backend: KubeRayBackend, name: str, words: list[str]
) -> str:
    """Return the RayJob of one attempt, which KubeRay does not repeat."""
    values = {"entrypoint": _build_entrypoint(backend, words), "in_archive": is_archive(backend)}
    values |= {"sweep": sweep, "policy": sweep.settings.policy, "backend": backend}
    return fill_template("ray_job.yaml.jinja", request=None, name=name, retries=0, **values)


def list_values_here(request: RenderRequest) -> dict[str, Any]:
    """Return the values of a RayJob whose driver keeps the schedule's state beside the sweep.

    KubeRay tries again only if the head was lost: a run that failed for good stays so.

    Raises:
        SpecError: the sweep has another backend, or the operator is too old.
    """
    backend = find_backend(request)
    return {
        "entrypoint": _build_entrypoint(backend, request.command("python", "--here", "--once")),
        "in_archive": is_archive(backend),
        "retries": request.sweep.settings.policy.max_attempts - 1,
    }


def find_backend(request: RenderRequest) -> KubeRayBackend:
    """Return the KubeRay settings of a sweep.

    Raises:
        SpecError: it has none, or the operator is too old.
    """
    backend = request.sweep.settings.backend
    if not isinstance(backend, KubeRayBackend):
        fix = "write backend: {kind: kuberay, image: ...}; cluster: names an existing RayCluster"
        refuse(request.sweep, "backend.kind", backend.kind, "pods need an image", fix)
    if request.kuberay < FIRST_VERSION:
        version = ".".join(str(number) for number in request.kuberay)
        reason = f"KubeRay {version} does not know backoffLimit, which came with 1.2"
        refuse(request.sweep, "", "", reason, "install KubeRay 1.2 or later")
    return backend


def is_archive(backend: KubeRayBackend) -> bool:
    """Return whether Ray fetches the project, instead of finding it in the image."""
    return is_url(backend.working_dir)


def _build_entrypoint(backend: KubeRayBackend, words: Sequence[str]) -> str:
    command = shlex.join(words)
    if is_archive(backend):
        return command
    return f"cd {shlex.quote(backend.working_dir)} && {command}"
