"""RayJobs, by a fake `kubectl` that answers as the real one does."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from ruamel.yaml import YAML

from gdpo_tune.clusters.backends import base
from gdpo_tune.clusters.backends.base import ProgramResult, ScheduledJob, call_program
from gdpo_tune.clusters.backends.kuberay import KubeRay
from gdpo_tune.clusters.load_schedules import list_overrides
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.render import KUBERAY
from tests.support.schedule import load_scheduled_sweep

NAME = "nightly-20260329T010000Z-a1"
REFUSED = "Unable to connect to the server: dial tcp 10.0.0.1:6443: connect: connection refused"


class Cluster:
    """The RayJobs of a namespace."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict] = {}
        self.calls: list[list[str]] = []
        self.says: ProgramResult | None = None
        """The answer to all calls, instead of the usual ones."""

    def __call__(self, backend: str, words: Sequence[str], text: str) -> ProgramResult:
        self.calls.append([backend, *words])
        if self.says is not None:
            return self.says
        tool, flag, _, verb, *rest = words
        assert (tool, flag) == ("kubectl", "--namespace")
        return getattr(self, verb)(rest, text)

    def auth(self, rest: list[str], text: str) -> ProgramResult:
        assert rest == ["can-i", "create", "rayjobs.ray.io"]
        return ProgramResult(0, "yes\n", "")

    def create(self, rest: list[str], text: str) -> ProgramResult:
        job = YAML(typ="safe").load(text)
        name = job["metadata"]["name"]
        if name in self.jobs:
            there = f'rayjobs.ray.io "{name}" already exists'
            return ProgramResult(1, "", f"Error from server (AlreadyExists): {there}")
        self.jobs[name] = {**job, "status": {}}
        return ProgramResult(0, f"rayjob.ray.io/{name} created", "")

    def get(self, rest: list[str], text: str) -> ProgramResult:
        found = self.jobs.get(rest[1])
        return ProgramResult(0, json.dumps(found) if found else "", "")

    def delete(self, rest: list[str], text: str) -> ProgramResult:
        self.jobs.pop(rest[1], None)
        return ProgramResult(0, "", "")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def backend(tmp_path, cluster) -> KubeRay:
    sweep = load_scheduled_sweep(tmp_path, KUBERAY)
    return KubeRay(sweep, sweep.settings.backend, cluster)


def job_for(backend: KubeRay) -> ScheduledJob:
    sweep = backend.sweep
    words = [
        word for each in list_overrides(sweep.settings, sweep.root) for word in ("--set", each)
    ]
    return ScheduledJob(
        NAME, NAME[:-3], (sweep.settings.space, "--name", NAME[:-3], *words), sweep.root
    )


@pytest.fixture
def known(backend: KubeRay) -> JobHandle:
    return backend.submit(job_for(backend))


def test_a_job_is_created_once(backend, cluster):
    for _ in range(2):
        assert backend.submit(job_for(backend)) == JobHandle(backend="kuberay", id=NAME.lower())
    (job,) = cluster.jobs.values()
    assert job["spec"]["entrypoint"] == (
        "cd /srv/search && python -m gdpo_tune.sweep search_spaces/gpu.yaml "
        "--name nightly-20260329T010000Z --set 'storage=\"/mnt/sweeps\"' "
        "--set search.budget.trials=60 --set search.budget.gpu_hours=80.0"
    )
    assert job["spec"]["backoffLimit"] == 0  # attempts are counted here
    assert job["spec"]["activeDeadlineSeconds"] == 11 * 3600
    assert cluster.calls[0][:4] == ["kuberay", "kubectl", "--namespace", "default"]


@pytest.mark.parametrize(
    ("status", "running", "seen", "reason"),
    [
        ({}, True, None, ""),
        ({"jobDeploymentStatus": "Initializing"}, True, None, ""),
        ({"jobDeploymentStatus": "Suspended"}, True, None, ""),
        ({"jobDeploymentStatus": "Running", "jobStatus": "SUCCEEDED"}, True, None, ""),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, False, 0, ""),
        (
            {
                "jobDeploymentStatus": "Failed",
                "jobStatus": "FAILED",
                "reason": "AppFailed",
                "message": "Job entrypoint command failed with exit code 2, last\nlogs: error:",
            },
            False,
            2,
            "AppFailed: failed: Job entrypoint command failed with exit code 2, last logs: error:",
        ),
        ({"jobDeploymentStatus": "ValidationFailed"}, False, None, "ValidationFailed"),
        (
            {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded", "jobStatus": "RUNNING"},
            False,
            None,
            "DeadlineExceeded: running",
        ),
    ],
)
def test_the_state_of_a_job(backend, cluster, status, running, seen, reason, known):
    cluster.jobs[known.id]["status"] = status
    state = backend.poll(known)
    assert (state.running, state.exit_status, state.reason) == (running, seen, reason)


def test_a_state_that_is_not_understood_is_no_end(backend, cluster, known):
    """KubeRay, rayjob_types.go, JobDeploymentStatus: versions add words to it."""
    cluster.jobs[known.id]["status"] = {"jobDeploymentStatus": "Hibernating"}
    state = backend.poll(known)
    assert state.running
    way = f"kubectl --namespace default delete rayjob {known.id}"
    assert state.reason.endswith(f"is unknown ('Hibernating'); if it has ended, run: {way}")


def test_a_job_that_is_stopped_is_gone(backend, cluster, known):
    backend.stop(known, 0.0)
    assert cluster.calls[-1][-2:] == ["--ignore-not-found", "--wait=false"]
    state = backend.poll(known)
    assert not state.running
    assert state.exit_status is None
    assert "no longer knows the RayJob" in state.reason
    backend.stop(known, 30.0)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (ProgramResult(1, "no\n", ""), BackendError, "no right to create RayJobs in default"),
        (ProgramResult(1, "no - no RBAC policy matched\n", ""), BackendError, "no right to create"),
        (
            ProgramResult(1, "", REFUSED),
            BackendUnreachableError,
            "does not answer: Unable to connect",
        ),
        (  # kubectl that knows no types, because it reaches no server
            ProgramResult(
                1, "", f"Warning: the server doesn't have a resource type 'rayjobs'\n{REFUSED}"
            ),
            BackendUnreachableError,
            "does not answer: .*connection refused",
        ),
        (
            ProgramResult(
                0, "yes\n", "Warning: the server doesn't have a resource type 'rayjobs' in group"
            ),
            BackendError,
            "install the KubeRay operator",
        ),
        (
            ProgramResult(1, "", "error: context was not found"),
            BackendError,
            "context was not found",
        ),
    ],
)
def test_the_check_of_kubernetes(backend, cluster, answer, error, message):
    backend.check()
    cluster.says = answer
    with pytest.raises(error, match=message):
        backend.check()


def test_kubernetes_does_not_answer(backend, cluster, known):
    cluster.says = ProgramResult(1, "", REFUSED)
    for call in (lambda: backend.poll(known), lambda: backend.stop(known, 0.0)):
        with pytest.raises(BackendUnreachableError):
            call()
    cluster.says = ProgramResult(
        1, "", 'admission webhook "kueue" denied the request: no such queue'
    )
    with pytest.raises(BackendError, match="no such queue"):
        backend.submit(job_for(backend))


@pytest.mark.parametrize("shown", ["Warning: x", "[]", '{"status": 5}', '{"status": [1]}'])
def test_output_that_is_not_a_ray_job(backend, cluster, shown, known):
    cluster.says = ProgramResult(0, shown, "")
    with pytest.raises(BackendError, match="kubectl shows no RayJob"):
        backend.poll(known)


def test_programs_that_are_missing_or_hang(monkeypatch):
    with pytest.raises(BackendError, match="backend kuberay: there is no program kubectl-of-mine"):
        call_program("kuberay", ["kubectl-of-mine"])
    assert call_program("kuberay", ["cat"], "hello").out == "hello"
    assert call_program("kuberay", ["printf", r"\377"]).out == "\ufffd"
    with pytest.raises(BackendError, match=r"/etc/passwd cannot be run \(Permission denied\)"):
        call_program("kuberay", ["/etc/passwd"])
    monkeypatch.setattr(base, "PROGRAM_SECONDS", 0.1)
    with pytest.raises(BackendUnreachableError, match=r"sleep gave no answer within 0\.1 s"):
        call_program("kuberay", ["sleep", "5"])
