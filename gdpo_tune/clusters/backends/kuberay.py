"""Jobs as RayJobs of Kubernetes, by `kubectl`: each attempt gets its own Ray cluster.

The RayJob has the name of the attempt, and Kubernetes refuses a second one of the same name: so
submitting it twice is the same as once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gdpo_tune.clusters.backends import base
from gdpo_tune.clusters.backends.base import JobStatus, ProgramResult, ScheduledJob, call_program
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.render import build_ray_job
from gdpo_tune.clusters.schedule_spec import KubeRayBackend
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError

ENDED = ("Complete", "Failed", "ValidationFailed")
"""`jobDeploymentStatus` of a RayJob that has ended."""
ACTIVE = ("", "Initializing", "Running", "Suspending", "Suspended", "Retrying", "Waiting")
"""Those of one that has not; any other word says neither. Source: KubeRay's rayjob_types.go."""
UNREACHABLE = re.compile(
    r"unable to connect|connection|was refused|no such host|timeout|timed out|deadline exceeded"
    r"|unavailable|unable to handle the request|EOF|internal ?error|etcdserver",
    re.IGNORECASE,
)
"""Part of the message of `kubectl` if Kubernetes does not answer."""


@dataclass(frozen=True)
class KubeRay:
    """The RayJobs of one namespace."""

    kind: ClassVar[str] = "kuberay"
    sweep: ScheduledSweep
    settings: KubeRayBackend
    call: Callable[[str, Sequence[str], str], ProgramResult] = call_program

    def check(self) -> None:
        """Ask Kubernetes whether RayJobs may be created."""
        answer = self._call("auth", "can-i", "create", "rayjobs.ray.io")
        if UNREACHABLE.search(answer.err):  # then it says also that it has no such type
            answer.raise_unless_expected(self.kind, UNREACHABLE)
        if "doesn't have a resource type" in answer.err:
            raise BackendError(
                "backend kuberay: Kubernetes does not know RayJobs\n"
                "    fix: install the KubeRay operator, 1.2 or later"
            )
        if answer.out.split()[:1] == ["no"]:  # sometimes followed by ` - ` and the reason
            raise BackendError(
                f"backend kuberay: no right to create RayJobs in {self.settings.namespace}\n"
                "    fix: bind a role for rayjobs (ray.io), as `render --to kuberay` writes it"
            )
        answer.raise_unless_expected(self.kind, UNREACHABLE)

    def submit(self, job: ScheduledJob) -> JobHandle:
        """Create a RayJob, unless it exists."""
        name = job.id.lower()
        manifest = build_ray_job(self.sweep, self.settings, name, job.build_command())
        answer = self._call("create", "-f", "-", text=manifest)
        answer.raise_unless_expected(self.kind, UNREACHABLE, expected="alreadyexists")
        return JobHandle(backend=self.kind, id=name)

    def poll(self, job: JobHandle) -> JobStatus:
        """Return the state of a RayJob."""
        answer = self._call("get", "rayjob", job.id, "--ignore-not-found", "-o", "json")
        answer.raise_unless_expected(self.kind, UNREACHABLE)
        if not answer.out.strip():
            return JobStatus(running=False, reason="Kubernetes no longer knows the RayJob")
        try:
            status: Any = json.loads(answer.out).get("status") or {}  # until KubeRay has seen it
            deployment = status.get("jobDeploymentStatus", "")
        except (ValueError, AttributeError) as error:
            raise BackendError(
                f"backend kuberay: kubectl shows no RayJob: {' '.join(answer.out.split())[:200]}\n"
                "    fix: check the output of kubectl get rayjob -o json"
            ) from error
        if deployment not in ENDED:
            way = f"kubectl --namespace {self.settings.namespace} delete rayjob {job.id}"
            reason = base.explain_unknown(f"RayJob {job.id}", deployment, way)
            return JobStatus(True, reason="" if deployment in ACTIVE else reason)
        job_status = status.get("jobStatus", "")
        if job_status == "SUCCEEDED":
            return JobStatus(running=False, exit_status=0)
        message = " ".join(str(status.get("message", "")).split())
        code = re.search(r"exit code (-?[0-9]+)", message)
        words = filter(None, [status.get("reason", ""), job_status.lower(), message])
        reason = ": ".join(words) or deployment
        return JobStatus(False, int(code.group(1)) if code else None, reason[:500])

    def stop(self, job: JobHandle, waited: float) -> None:
        """Delete the RayJob: KubeRay then asks Ray to stop the job, and removes the cluster."""
        words = ("delete", "rayjob", job.id, "--ignore-not-found", "--wait=false")
        self._call(*words).raise_unless_expected(self.kind, UNREACHABLE)

    def _call(self, *words: str, text: str = "") -> ProgramResult:
        command = ("kubectl", "--namespace", self.settings.namespace, *words)
        return self.call(self.kind, command, text)
