"""What every backend promises; RayJobs by a fake `kubectl`, and local jobs without processes."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_tune.clusters.backends import base, local_jobs, supervise
from gdpo_tune.clusters.backends.base import (
    CHECKPOINT_SECONDS,
    JobStatus,
    ProgramResult,
    build_backend,
    call_program,
)
from gdpo_tune.clusters.backends.kuberay import KubeRay
from gdpo_tune.clusters.backends.local_jobs import Local
from gdpo_tune.clusters.backends.slurm import Slurm
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.render import KUBERAY, RAY, SLURM
from tests.support.schedule import load_scheduled_sweep
from tests.support.schedulers import RUN, KubernetesJobs, SlurmPrograms, build_job

ID = f"{RUN}-a1"
REFUSED = "Unable to connect to the server: dial tcp 10.0.0.1:6443: connect: connection refused"
RUNNING = JobStatus(running=True)
LOG = "error: no such policy" + "!" * 300


def end(status=None, reason=""):
    return JobStatus(False, status, reason)


class SlurmSite:
    """Slurm, and what a test lets it say."""

    text, handle = SLURM, {"backend": "slurm", "id": "40"}
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    refusal = "sbatch: error: invalid partition specified: gpu"

    def __init__(self, sweep):
        self.programs = SlurmPrograms()
        self.jobs = self.programs.jobs
        self.backend = Slurm(sweep, sweep.settings.backend, self.programs)

    def show(self, job, states, status=None):
        for state in states.split():
            if state == "forgotten":
                self.programs.purge(job.id)
            else:
                self.jobs[job.id].state = state
        if status is not None:
            Path(job.directory, "end").write_text(f"{status}\n")
            Path(job.directory, "log.txt").write_text(f"{LOG}\n")

    def fail(self, message):
        self.programs.says = ProgramResult(1, "", message)

    def refuse(self):
        self.programs.sbatch = lambda _: ProgramResult(1, "", self.refusal)


class KubeRaySite:
    """The RayJobs of Kubernetes."""

    text, handle = KUBERAY, {"backend": "kuberay", "id": ID.lower()}
    away, refusal = REFUSED, 'admission webhook "kueue" denied the request: no such queue'

    def __init__(self, sweep):
        self.programs = KubernetesJobs()
        self.jobs = self.programs.jobs
        self.backend = KubeRay(sweep, sweep.settings.backend, self.programs)

    def show(self, job, deployment, job_status="", **more):
        status = {"jobDeploymentStatus": deployment, "jobStatus": job_status, **more}
        self.jobs[job.id]["status"] = {name: text for name, text in status.items() if text}

    fail = SlurmSite.fail

    def refuse(self):
        self.fail(self.refusal)


class RaySite:
    """The jobs of a Ray cluster."""

    text, handle = RAY, {"backend": "ray-job", "id": ID}
    away = "Request failed with status code 503: <html>."
    refusal = "Package size (600MiB) exceeds the maximum size of 512MiB"

    def __init__(self, sweep, client):
        self.client, self.jobs = client, client.jobs
        self.backend = build_backend(sweep)

    def show(self, job, status, code=None):
        self.jobs[job.id].message = f"Job entrypoint command\n failed with exit code {code}"
        self.client.end_job(job.id, status, code)

    def fail(self, message):
        def fail(*_, **__):
            raise RuntimeError(message)

        for method in ("submit_job", "get_job_info", "stop_job"):
            setattr(self.client, method, fail)

    refuse = KubeRaySite.refuse


@pytest.fixture
def site(request, tmp_path):
    """Build the site of a kind, which may stand in the row of a table."""
    kind = {"slurm": SlurmSite, "kuberay": KubeRaySite, "ray-job": RaySite}[request.param]
    needs = []
    if kind is RaySite:
        request.getfixturevalue("head")
        needs = [request.getfixturevalue("client")]
    sweep = load_scheduled_sweep(tmp_path, kind.text)
    site = kind(sweep, *needs)
    site.job = build_job(sweep)
    return site


every_backend = pytest.mark.parametrize("site", ["slurm", "kuberay", "ray-job"], indirect=True)
kuberay = pytest.mark.parametrize("site", ["kuberay"], indirect=True)


@every_backend
def test_a_job_is_submitted_once(site):
    for _ in range(2):
        known = site.backend.submit(site.job)
        assert known.model_dump(include={"backend", "id"}) == site.handle
    assert len(site.jobs) == 1
    assert JobHandle.model_validate_json(known.model_dump_json()) == known


FAILED = {
    "reason": "AppFailed",
    "message": "Job entrypoint command failed with exit code 2, last\nlogs: error:",
}
KUBERAY_FAILED = "Job entrypoint command failed with exit code 2, last logs: error:"
UNKNOWN = "the state of {} is unknown ({!r}); if it has ended, run: {}"


@pytest.mark.parametrize(
    ("site", "shown", "status"),
    [
        *(("slurm", [state], RUNNING) for state in ("PENDING", "CONFIGURING", "RUNNING")),
        *(("slurm", [state], RUNNING) for state in ("COMPLETING", "REQUEUED", "SUSPENDED")),
        ("slurm", ["NODE_FAIL"], end(None, "node fail")),
        ("slurm", ["FAILED", 2], end(2, f"exit status 2: {LOG[:300]}")),
        ("slurm", ["FAILED forgotten", 2], end(2, f"exit status 2: {LOG[:300]}")),
        ("slurm", ["FAILED forgotten", 0], end(0)),
        # slurm.conf(5): the controller forgets after MinJobAge, 300 s; sacct(1) adds by whom
        ("slurm", ["CANCELLED forgotten"], end(None, "cancelled")),
        ("slurm", ["TIMEOUT forgotten"], end(None, "timeout")),
        ("slurm", ["COMPLETED forgotten"], end(None, "completed")),
        *(("kuberay", [state], RUNNING) for state in ("", "Initializing", "Suspended")),
        ("kuberay", ["Running", "SUCCEEDED"], RUNNING),
        ("kuberay", ["Complete", "SUCCEEDED"], end(0)),
        ("kuberay", ["Failed", "FAILED", FAILED], end(2, f"AppFailed: failed: {KUBERAY_FAILED}")),
        ("kuberay", ["ValidationFailed"], end(None, "ValidationFailed")),
        (
            *("kuberay", ["Failed", "RUNNING", {"reason": "DeadlineExceeded"}]),
            end(None, "DeadlineExceeded: running"),
        ),
        # KubeRay, rayjob_types.go, JobDeploymentStatus: versions add words to it
        (
            *("kuberay", ["Hibernating"]),
            JobStatus(
                running=True,
                reason=UNKNOWN.format(
                    f"RayJob {ID.lower()}",
                    "Hibernating",
                    f"kubectl --namespace default delete rayjob {ID.lower()}",
                ),
            ),
        ),
        *(("ray-job", [state], RUNNING) for state in ("PENDING", "RUNNING")),
        ("ray-job", ["SUCCEEDED", 0], end(0)),
        (
            "ray-job",
            ["FAILED", 2],
            end(2, "failed: Job entrypoint command failed with exit code 2"),
        ),
        (
            "ray-job",
            ["FAILED"],
            end(None, "failed: Job entrypoint command failed with exit code None"),
        ),
        (
            "ray-job",
            ["STOPPED"],
            end(None, "stopped: Job entrypoint command failed with exit code None"),
        ),
        # ray.job_submission.JobStatus: three of its five states are terminal; any other is new
        (
            *("ray-job", ["HIBERNATING"]),
            JobStatus(
                running=True,
                reason=UNKNOWN.format(f"job {ID}", "HIBERNATING", f"ray job delete {ID}"),
            ),
        ),
    ],
    indirect=["site"],
)
def test_the_state_of_a_job(site, shown, status):
    known = site.backend.submit(site.job)
    more = shown[-1] if isinstance(shown[-1], dict) else {}
    site.show(known, *[each for each in shown if each is not more], **more)
    assert site.backend.poll(known) == status


@every_backend
def test_a_job_that_is_stopped_ends_and_may_be_stopped_again(site):
    known = site.backend.submit(site.job)
    for waited in (CHECKPOINT_SECONDS, CHECKPOINT_SECONDS + 30):
        site.backend.stop(known, waited)
        assert not site.backend.poll(known).running


@every_backend
def test_a_scheduler_that_does_not_answer(site):
    """The job may have been submitted, or run on."""
    known = site.backend.submit(site.job)
    site.backend.check()
    site.fail(site.away)
    poll, stop = (lambda: site.backend.poll(known)), (lambda: site.backend.stop(known, 0.0))
    for call in (poll, stop, *([] if isinstance(site, RaySite) else [site.backend.check])):
        with pytest.raises(
            BackendUnreachableError, match=f"backend {known.backend}.* does not answer"
        ):
            call()


@every_backend
def test_a_job_that_is_refused(site):
    site.refuse()
    with pytest.raises(BackendError) as caught:
        site.backend.submit(site.job)
    assert site.refusal in str(caught.value)


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        ("kuberay", "Kubernetes no longer knows the RayJob"),
        ("ray-job", "the cluster no longer knows the job"),
    ],
    indirect=["site"],
)
def test_a_job_that_is_gone_has_ended(site, reason):
    assert site.backend.poll(JobHandle(backend="x", id="gone")) == end(None, reason)


# RayJobs of Kubernetes


@kuberay
def test_the_manifest_of_a_ray_job(site):
    known = site.backend.submit(site.job)
    (job,) = site.jobs.values()
    assert job["spec"]["entrypoint"] == (
        "cd /srv/search && python -m gdpo_tune.sweep search_spaces/gpu.yaml "
        "--name nightly-20260329T010000Z --set 'storage=\"/mnt/sweeps\"' "
        "--set search.budget.trials=60 --set search.budget.gpu_hours=80.0"
    )
    assert job["spec"]["backoffLimit"] == 0  # attempts are counted here
    assert job["spec"]["activeDeadlineSeconds"] == 11 * 3600
    assert site.programs.calls[0][:4] == ["kuberay", "kubectl", "--namespace", "default"]
    site.backend.stop(known, 0.0)
    assert site.programs.calls[-1][-2:] == ["--ignore-not-found", "--wait=false"]


NO_TYPE = "Warning: the server doesn't have a resource type 'rayjobs'"


@kuberay
@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((1, "no\n", ""), BackendError, "no right to create RayJobs in default"),
        ((1, "no - no RBAC policy matched\n", ""), BackendError, "no right to create"),
        ((1, "", REFUSED), BackendUnreachableError, "does not answer: Unable to connect"),
        # kubectl that knows no types, because it reaches no server
        (
            *((1, "", f"{NO_TYPE}\n{REFUSED}"), BackendUnreachableError),
            "does not answer: .*connection refused",
        ),
        ((0, "yes\n", f"{NO_TYPE} in group"), BackendError, "install the KubeRay operator"),
        ((1, "", "error: context was not found"), BackendError, "context was not found"),
    ],
)
def test_the_check_of_kubernetes(site, answer, error, message):
    site.backend.check()
    site.programs.says = ProgramResult(*answer)
    with pytest.raises(error, match=message):
        site.backend.check()


@kuberay
@pytest.mark.parametrize("shown", ["Warning: x", "[]", '{"status": 5}', '{"status": [1]}'])
def test_output_that_is_not_a_ray_job(site, shown):
    known = site.backend.submit(site.job)
    site.programs.says = ProgramResult(0, shown, "")
    with pytest.raises(BackendError, match="kubectl shows no RayJob"):
        site.backend.poll(known)


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


# Local jobs


def test_a_beat_that_is_old_by_a_clock_that_was_set_is_awaited(tmp_path, monkeypatch):
    """The clock of the file server jumps between two beats: stat(2), st_mtime is its time."""
    job = JobHandle(backend="local", id="x", directory=str(tmp_path), machine="another")
    beat = tmp_path / "beat"
    beat.touch()
    old = time.time() - 3600
    os.utime(beat, (old, old))
    waited = []

    def beat_again(seconds):
        waited.append(seconds)
        beat.touch()

    monkeypatch.setattr(local_jobs, "time", SimpleNamespace(sleep=beat_again))
    assert Local(tmp_path).poll(job).running
    assert waited == [local_jobs.WATCH_SECONDS]
    os.utime(beat, (old, old))
    monkeypatch.setattr(local_jobs, "time", SimpleNamespace(sleep=waited.append))
    assert not Local(tmp_path).poll(job).running


def test_a_supervisor_that_failed_leaves_the_job_to_the_next(tmp_path):
    state = tmp_path / supervise.STATE
    with (tmp_path / supervise.LOCK).open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with (tmp_path / supervise.LOCK).open("w") as second:
            threading.Timer(0.2, first.close).start()
            assert supervise._take_lock(second, state)
            state.touch()
            assert not supervise._take_lock(second, state)
