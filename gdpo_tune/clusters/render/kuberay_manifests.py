"""A CronJob of Kubernetes whose pod runs our command and waits, while KubeRay carries out RayJobs.

With `--ray-cron-job` a RayCronJob instead, by which KubeRay keeps the schedule itself.
"""

from __future__ import annotations

from gdpo_tune.clusters.backends.manifests import RAY, Tree, metadata, pod_spec, text
from gdpo_tune.clusters.decide import ON_TIME
from gdpo_tune.clusters.render.base import Rendered, Request, refuse
from gdpo_tune.clusters.render.cron_line import five_fields, spring_note
from gdpo_tune.clusters.render.ray_job import backend_of, own_spec
from gdpo_tune.clusters.schedule_spec import KubeRayBackend
from gdpo_tune.core.object_store import is_url

ACCOUNT = "gdpo-tune"
FINAL = [1, 2, 3, 4, 5]
"""Exit statuses that another pod would have, too; a pod that was evicted has none of them."""
SIZE = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
"""Of the pod that waits. It compares fronts at the end."""
FIRST_CRON_JOB, FIRST_ZONE = (1, 6), (1, 7)
"""KubeRay's version that brought RayCronJob, and the one that gave it a time zone."""


def render(request: Request) -> Rendered:
    """The manifest.

    Raises:
        SpecError: the sweep says nothing of KubeRay, or the schedule cannot be said.
    """
    backend = backend_of(request)
    name = f"{request.sweep.name}.yaml"
    if request.ray_cron_job:
        left_out = _left_out_by_ray(request)
        documents = [_ray_cron_job(request, backend)]
    else:
        left_out = _left_out(request)
        documents = [*_rights(backend), _cron_job(request, backend)]
    left_out += spring_note(request, "KubeRay" if request.ray_cron_job else "Kubernetes")
    return Rendered({name: text(documents, request.head(name, left_out))}, tuple(left_out))


def _cron_job(request: Request, backend: KubeRayBackend) -> Tree:
    sweep, policy = request.sweep, request.sweep.settings.policy
    if is_url(backend.working_dir):
        fix = "write the image's folder with sweeps/ in it, or take --to rayjob"
        reason = "the CronJob's pod reads the file of the sweep from its image"
        refuse(sweep, "backend.working_dir", backend.working_dir, reason, fix)
    late = policy.missed_grace if policy.missed == "run_once" else round(ON_TIME.total_seconds())
    container = {
        "name": "schedule",
        "image": backend.image,
        "workingDir": backend.working_dir,
        "command": request.command("python"),
        "resources": SIZE,
    }
    pod = pod_spec(backend, sweep, container)
    pod = {"serviceAccountName": ACCOUNT, **pod, "restartPolicy": "Never"}
    wrong = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": FINAL}}
    job = {"backoffLimit": 6, "podFailurePolicy": {"rules": [wrong]}, "template": {"spec": pod}}
    spec: Tree = {
        "schedule": five_fields(request, star_decides=False),
        "timeZone": request.schedule.timezone,
        "concurrencyPolicy": "Replace" if policy.overlap == "replace" else "Forbid",
        "startingDeadlineSeconds": max(late, 60),  # below 10 Kubernetes may never start any
        **({} if sweep.settings.enabled else {"suspend": True}),
        "jobTemplate": {"spec": job},
    }
    about = metadata(backend, sweep.name, sweep)
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": about, "spec": spec}


def _rights(backend: KubeRayBackend) -> list[Tree]:
    """What lets the CronJob's pod create RayJobs, look at them and delete them."""
    access = "rbac.authorization.k8s.io"
    account = backend.service_account or ACCOUNT
    about = {"name": ACCOUNT, "namespace": backend.namespace}
    verbs = ["create", "get", "delete"]
    rules = [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": verbs}]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": backend.namespace}
    role = {"apiGroup": access, "kind": "Role", "name": ACCOUNT}
    own = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about}
    return [
        *([] if backend.service_account else [own]),
        {"apiVersion": f"{access}/v1", "kind": "Role", "metadata": about, "rules": rules},
        {
            "apiVersion": f"{access}/v1",
            "kind": "RoleBinding",
            "metadata": {**about, "name": f"{ACCOUNT}-{account}"},
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def _ray_cron_job(request: Request, backend: KubeRayBackend) -> Tree:
    version, zone = ".".join(str(number) for number in request.kuberay), request.schedule.timezone
    if request.kuberay < FIRST_CRON_JOB:
        reason = f"KubeRay {version} has no RayCronJob, which came with 1.6"
        refuse(request.sweep, "", "", reason, "leave out --ray-cron-job: a CronJob needs none")
    if request.kuberay < FIRST_ZONE and zone != "UTC":
        reason = f"RayCronJob of KubeRay {version} has no time zone, which came with 1.7"
        fix = "write UTC, or leave out --ray-cron-job"
        refuse(request.sweep, "schedule.timezone", zone, reason, fix)
    if backend.queue:
        reason = "a RayCronJob cannot give its RayJobs the label by which Kueue knows them"
        fix = "leave out --ray-cron-job"
        refuse(request.sweep, "backend.queue", backend.queue, reason, fix)
    spec: Tree = {
        "schedule": five_fields(request, star_decides=False),
        **({"timeZone": zone} if request.kuberay >= FIRST_ZONE else {}),
        **({} if request.sweep.settings.enabled else {"suspend": True}),
        "jobTemplate": own_spec(request, backend),
    }
    about = metadata(backend, request.sweep.name, request.sweep)
    return {"apiVersion": RAY, "kind": "RayCronJob", "metadata": about, "spec": spec}


def _left_out(request: Request) -> list[str]:
    if request.sweep.settings.policy.overlap != "skip":
        return []
    late = "a time that comes during a run is made up for after it, within missed_grace"
    return [f"overlap skip: {late}"]


def _left_out_by_ray(request: Request) -> list[str]:
    found = [
        "missed, missed_grace: after an outage KubeRay creates a RayJob for every time, and each "
        "asks for the last one",
    ]
    if request.kuberay < FIRST_ZONE:
        found.append("the time zone: the operator's own clock counts, which should be UTC")
    return found
