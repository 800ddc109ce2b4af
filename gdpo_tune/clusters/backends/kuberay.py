"""Jobs as RayJobs of Kubernetes, by `kubectl`: a Ray cluster of its own for each attempt.

The name of a RayJob is that of the attempt, and Kubernetes refuses a second one of the same name:
that makes submitting twice the same as submitting once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from gdpo_tune.clusters.backends import programs
from gdpo_tune.clusters.backends.base import Job, Look
from gdpo_tune.clusters.backends.manifests import RAY, metadata, ray_job_spec, text
from gdpo_tune.clusters.backends.programs import Answer
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import KubeRayBackend
from gdpo_tune.clusters.shapes import NamedJob, Shape
from gdpo_tune.core.errors import BackendError, BackendUnreachableError

ENDED = ("Complete", "Failed", "ValidationFailed")
"""`jobDeploymentStatus` of a RayJob that nothing will happen to any more."""
EXIT_CODE = re.compile(r"exit code (-?[0-9]+)")
"""In Ray's message about a job that failed."""
AWAY = re.compile(
    r"unable to connect|connection refused|was refused|no such host|timeout|timed out"
    r"|unavailable|unable to handle the request|EOF",
    re.IGNORECASE,
)
"""In what `kubectl` says when nobody answered it."""


def backend(sweep: ScheduledSweep) -> KubeRay:
    """The backend of a sweep."""
    settings = sweep.settings.backend
    assert isinstance(settings, KubeRayBackend), settings.kind
    return KubeRay(sweep, settings)


@dataclass(frozen=True)
class KubeRay:
    """The RayJobs of one namespace."""

    kind: ClassVar[str] = "kuberay"
    job_shape: ClassVar[type[Shape]] = NamedJob
    sweep: ScheduledSweep
    settings: KubeRayBackend
    call: Callable[[str, Sequence[str], str], Answer] = programs.call

    def check(self) -> None:
        """Ask Kubernetes whether RayJobs may be created.

        Raises:
            BackendError: they may not, or KubeRay is not there.
            BackendUnreachableError: it does not answer.
        """
        answer = self._kubectl("auth", "can-i", "create", "rayjobs.ray.io")
        if "doesn't have a resource type" in answer.err:
            raise BackendError(
                "backend kuberay: Kubernetes does not know RayJobs\n"
                "    fix: install the KubeRay operator, 1.2 or later"
            )
        if answer.out.split()[:1] == ["no"]:  # and sometimes ` - ` with the reason
            raise BackendError(
                f"backend kuberay: no right to create RayJobs in {self.settings.namespace}\n"
                "    fix: bind a role for rayjobs (ray.io), as `render --to kuberay` writes it"
            )
        self._refuse(answer)

    def submit(self, job: Job) -> dict[str, Any]:
        """Create a RayJob; one that is there already is as good."""
        name = job.id.lower()
        manifest = {
            "apiVersion": RAY,
            "kind": "RayJob",
            "metadata": metadata(self.settings, name, self.sweep),
            "spec": ray_job_spec(self.settings, self.sweep, job.command()),
        }
        answer = self._kubectl("create", "-f", "-", text=text([manifest], ()))
        if "AlreadyExists" not in answer.err:
            self._refuse(answer)
        return {"id": name}

    def look(self, job: dict[str, Any]) -> Look:
        """See how a RayJob does."""
        answer = self._kubectl("get", "rayjob", job["id"], "--ignore-not-found", "-o", "json")
        self._refuse(answer)
        if not answer.out.strip():
            return Look(running=False, reason="Kubernetes does not know the RayJob any more")
        status = status_in(answer.out)
        deployment, ended = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
        if deployment not in ENDED:
            return Look(running=True)
        if ended == "SUCCEEDED":
            return Look(running=False, status=0)
        message = " ".join(str(status.get("message", "")).split())
        code = EXIT_CODE.search(message)
        words = [status.get("reason", ""), ended.lower(), message]
        reason = ": ".join(word for word in words if word) or deployment
        return Look(False, int(code.group(1)) if code else None, reason[:500])

    def stop(self, job: dict[str, Any], waited: float) -> None:
        """Delete the RayJob: KubeRay then asks Ray to stop the job, and removes the cluster."""
        words = ("delete", "rayjob", job["id"], "--ignore-not-found", "--wait=false")
        self._refuse(self._kubectl(*words))

    def _kubectl(self, *words: str, text: str = "") -> Answer:
        command = ["kubectl", "--namespace", self.settings.namespace, *words]
        return self.call("kuberay", command, text)

    def _refuse(self, answer: Answer) -> None:
        if answer.status == 0:
            return
        if AWAY.search(answer.words):
            raise BackendUnreachableError(
                f"backend kuberay: Kubernetes does not answer: {answer.words}\n"
                "    fix: mend KUBECONFIG, or the cluster"
            )
        raise BackendError(f"backend kuberay: {answer.words}")


def status_in(manifest: str) -> dict[str, Any]:
    """The status of a RayJob; empty as long as KubeRay has not looked at it.

    Raises:
        BackendError: that is no RayJob.
    """
    try:
        status: Any = json.loads(manifest).get("status") or {}
    except (ValueError, AttributeError):
        status = None
    if not isinstance(status, dict):
        raise BackendError(
            f"backend kuberay: kubectl shows no RayJob: {' '.join(manifest.split())[:200]}\n"
            "    fix: look at what kubectl get rayjob -o json prints"
        )
    return cast("dict[str, Any]", status)
