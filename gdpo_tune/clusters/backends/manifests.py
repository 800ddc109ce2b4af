"""RayJobs: what KubeRay is told to run, and the pods that it runs on.

Field names and limits: KubeRay 1.7, ray-operator/apis/ray/v1/rayjob_types.go and
controllers/ray/utils/validation.go.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import KubeRayBackend, Pod
from gdpo_tune.core.object_store import is_url

Tree = dict[str, Any]
RAY = "ray.io/v1"
KEPT_SECONDS = 60
"""How long pods stay after the end of a job: for a last look, and every GPU of them idle."""
PATIENCE = 3600
"""Seconds beyond `max_runtime` after which KubeRay ends a job that nobody ended: its clock begins
before pods are placed and images there."""
READ_OTHERWISE = re.compile(r"y|n|yes|no|on|off|[-+0-9][0-9_:.]*", re.IGNORECASE)
"""Text that a reader of YAML 1.1, as Kubernetes is, takes for a truth or a number."""


def text(documents: Sequence[Tree], head: Sequence[str]) -> str:
    """Documents as YAML, with `head` as comments."""
    yaml, stream = YAML(), StringIO()
    yaml.width = 4096
    yaml.dump_all([_quoted(document) for document in documents], stream)
    body = stream.getvalue().removeprefix("---\n")
    return "".join(f"# {line}\n" for line in head) + body


def _quoted(value: object) -> object:
    """The value with its texts so written that every reader takes them for texts."""
    if isinstance(value, Mapping):
        return {key: _quoted(child) for key, child in cast("Tree", value).items()}
    if isinstance(value, list):
        children = CommentedSeq(_quoted(child) for child in cast("list[object]", value))
        if not any(isinstance(child, dict | list) for child in children):
            children.fa.set_flow_style()
        return children
    if isinstance(value, str) and "\n" in value:
        return LiteralScalarString(value)
    if isinstance(value, str) and (READ_OTHERWISE.fullmatch(value) or " " in value):
        return DoubleQuotedScalarString(value)
    return value


def metadata(backend: KubeRayBackend, name: str, sweep: ScheduledSweep) -> Tree:
    """Name, namespace and labels of an object."""
    labels = {"app.kubernetes.io/name": "gdpo-tune", "gdpo-tune/sweep": sweep.name}
    queue = {"kueue.x-k8s.io/queue-name": backend.queue} if backend.queue else {}
    return {"name": name, "namespace": backend.namespace, "labels": {**labels, **queue}}


def ray_job_spec(
    backend: KubeRayBackend,
    sweep: ScheduledSweep,
    words: Sequence[str],
    *,
    retries: int = 0,
) -> Tree:
    """The `spec` of a RayJob.

    Args:
        backend: where it works.
        sweep: whose storage is mounted.
        words: what the driver on the head runs.
        retries: how often KubeRay tries again, with a new cluster each time.
    """
    spec: Tree = {"entrypoint": entrypoint(backend, words)}
    if is_url(backend.working_dir):
        spec["runtimeEnvYAML"] = f"working_dir: {backend.working_dir}\n"
    # the operator hands the text to Ray as it is; a submitter's shell would read it once more
    spec["submissionMode"] = "HTTPMode"
    if sweep.settings.policy.max_runtime is not None:
        spec["activeDeadlineSeconds"] = sweep.settings.policy.max_runtime + PATIENCE
    if backend.cluster:
        return {**spec, "clusterSelector": {"ray.io/cluster": backend.cluster}}
    return {
        **spec,
        "backoffLimit": retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        **({"suspend": True} if backend.queue else {}),
        "rayClusterSpec": ray_cluster_spec(backend, sweep),
    }


def entrypoint(backend: KubeRayBackend, words: Sequence[str]) -> str:
    """A command as the shell on the head reads it."""
    command = shlex.join(words)
    if is_url(backend.working_dir):
        return command
    return f"cd {shlex.quote(backend.working_dir)} && {command}"


def ray_cluster_spec(backend: KubeRayBackend, sweep: ScheduledSweep) -> Tree:
    """A head and its workers."""
    head = {"rayStartParams": {}, "template": _template(backend, sweep, backend.head, "ray-head")}
    workers = {
        "groupName": "workers",
        "replicas": backend.workers,
        "minReplicas": backend.workers,
        "maxReplicas": backend.workers,
        "rayStartParams": {},
        "template": _template(backend, sweep, backend.worker, "ray-worker"),
    }
    return {
        "headGroupSpec": head,
        **({"workerGroupSpecs": [workers]} if backend.workers else {}),
    }


def _template(backend: KubeRayBackend, sweep: ScheduledSweep, size: Pod, name: str) -> Tree:
    limits: Tree = {"cpu": str(size.cpus), "memory": size.memory}
    if size.gpus:
        limits["nvidia.com/gpu"] = str(size.gpus)
    container = {"name": name, "image": backend.image, "resources": {"limits": limits}}
    return {"spec": pod_spec(backend, sweep, container)}


def pod_spec(backend: KubeRayBackend, sweep: ScheduledSweep, container: Tree) -> Tree:
    """A pod with one container, with what every pod gets: secret, storage, account."""
    pod: Tree = {"serviceAccountName": backend.service_account} if backend.service_account else {}
    if backend.secret:
        container = {**container, "envFrom": [{"secretRef": {"name": backend.secret}}]}
    if not backend.claim:
        return {**pod, "containers": [container]}
    mounts = [{"name": "storage", "mountPath": sweep.storage}]
    claim = {"name": "storage", "persistentVolumeClaim": {"claimName": backend.claim}}
    return {**pod, "containers": [{**container, "volumeMounts": mounts}], "volumes": [claim]}
