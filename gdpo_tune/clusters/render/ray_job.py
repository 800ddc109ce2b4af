"""A RayJob that runs a sweep once: for `kubectl create`, a pipeline, or a queue of Kueue."""

from __future__ import annotations

from gdpo_tune.clusters.backends.manifests import RAY, Tree, metadata, ray_job_spec, text
from gdpo_tune.clusters.render.base import Rendered, Request, refuse
from gdpo_tune.clusters.schedule_spec import KubeRayBackend

FIRST = (1, 2)
"""KubeRay's version that brought the last of the fields that are used: `backoffLimit`."""


def render(request: Request) -> Rendered:
    """The manifest.

    Raises:
        SpecError: the sweep says nothing of KubeRay.
    """
    backend = backend_of(request)
    name, sweep = f"{request.sweep.name}.rayjob.yaml", request.sweep
    left_out = ["the schedule: the RayJob begins when it is created, for the last time of it"]
    if backend.cluster:
        left_out.append("another try of KubeRay's own: backoffLimit needs a cluster of its own")
    about = metadata(backend, "", sweep)
    about = {"generateName": f"{sweep.name}-", **{k: v for k, v in about.items() if k != "name"}}
    spec = own_spec(request, backend)
    document = {"apiVersion": RAY, "kind": "RayJob", "metadata": about, "spec": spec}
    return Rendered({name: text([document], request.head(name, left_out))}, tuple(left_out))


def backend_of(request: Request) -> KubeRayBackend:
    """What the sweep says of KubeRay.

    Raises:
        SpecError: nothing, or the operator is too old.
    """
    backend = request.sweep.settings.backend
    if not isinstance(backend, KubeRayBackend):
        fix = "write backend: {kind: kuberay, image: ...}; cluster: names one that is there already"
        refuse(request.sweep, "backend.kind", backend.kind, "pods need an image", fix)
    if request.kuberay < FIRST:
        version = ".".join(str(number) for number in request.kuberay)
        reason = f"KubeRay {version} does not know backoffLimit, which came with 1.2"
        refuse(request.sweep, "", "", reason, "install KubeRay 1.2 or later")
    return backend


def own_spec(request: Request, backend: KubeRayBackend) -> Tree:
    """A RayJob whose driver keeps history, attempts and budgets, and runs the sweep beside it.

    KubeRay tries again only where the head was lost: a run that failed for good stays so.
    """
    words = request.command("python", "--here", "--once")
    retries = request.sweep.settings.policy.max_attempts - 1
    return ray_job_spec(backend, request.sweep, words, retries=retries)
