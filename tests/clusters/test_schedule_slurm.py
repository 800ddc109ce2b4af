"""Jobs of Slurm by fake commands, and scripts that run without Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gdpo_tune.clusters.backends.base import CHECKPOINT_SECONDS, JobStatus, ScheduledJob
from gdpo_tune.clusters.backends.slurm import Slurm
from gdpo_tune.clusters.outside_calls import ProgramAnswer
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.render import SLURM
from tests.support.schedule import load_scheduled_sweep

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
GONE = "slurm_load_jobs error: Invalid job id specified"


class Controller:
    """A fake of Slurm's commands."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, str]] = {}
        """Id -> name, state, script."""
        self.calls: list[Sequence[str]] = []
        self.says: ProgramAnswer | None = None

    def __call__(self, backend: str, words: Sequence[str], text: str) -> ProgramAnswer:
        self.calls.append(words)
        return self.says or getattr(self, words[0])(list(words[1:]))

    def scontrol(self, words: list[str]) -> ProgramAnswer:
        return ProgramAnswer(0, "Slurmctld(primary) at head is UP\n", "")

    def sbatch(self, words: list[str]) -> ProgramAnswer:
        script = Path(words[1])
        lines = script.read_text().splitlines()
        (name,) = [line.partition("--job-name=")[2] for line in lines if "--job-name=" in line]
        known = str(40 + len(self.jobs))
        self.jobs[known] = {"name": name, "state": "PENDING", "script": str(script)}
        return ProgramAnswer(0, f"{known};cluster\n", "")

    def squeue(self, words: list[str]) -> ProgramAnswer:
        if "--name" in words:
            name = words[words.index("--name") + 1]
            found = [known for known, job in self.jobs.items() if job["name"] == name]
            return ProgramAnswer(0, "".join(f"{each}\n" for each in found), "")
        known = words[words.index("--jobs") + 1]
        if known not in self.jobs:
            return ProgramAnswer(1, "", GONE)
        return ProgramAnswer(0, self.jobs[known]["state"] + "\n", "")

    def scancel(self, words: list[str]) -> ProgramAnswer:
        if words[-1] not in self.jobs:
            return ProgramAnswer(1, "", f"scancel: error: {GONE}")
        if "--signal=TERM" not in words:
            self.jobs[words[-1]]["state"] = "CANCELLED"
        return ProgramAnswer(0, "", "")


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def backend(tmp_path, controller) -> Slurm:
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    return Slurm(sweep, sweep.settings.backend, controller)


@pytest.fixture
def job(backend) -> ScheduledJob:
    arguments = (backend.sweep.settings.space, "--name", "nightly-1")
    return ScheduledJob("nightly-1-a1", "nightly-1", arguments, backend.sweep.root)


def test_a_job_is_submitted_once(backend, controller, job, tmp_path):
    known = [backend.submit(job) for _ in range(2)]
    folder = tmp_path / "runs" / ".schedule" / "nightly" / "jobs" / "nightly-1-a1"
    assert known[0] == known[1]
    assert (known[0].id, known[0].directory) == ("40", str(folder))
    (submitted,) = controller.jobs.values()
    script = Path(submitted["script"]).read_text()
    for option in ("--nodes=2", "--exclusive", "--gpus-per-node=4", "--partition=gpu", "--requeue"):
        assert f"#SBATCH {option}\n" in script
    assert "#SBATCH --time=10:15:00\n" in script
    assert "python -m gdpo_tune.sweep search_spaces/gpu.yaml --name nightly-1 &" in script


def test_a_caller_that_was_killed_leaves_nothing_to_clean_up(backend, controller, job):
    known = backend.submit(job)
    folder = Path(known.directory)
    (folder / "id").unlink()  # killed before it was written: the job is in the queue
    assert backend.submit(job) == known
    controller.jobs.clear()
    (folder / "begun").write_text("40\n")  # ended meanwhile, and Slurm has forgotten it
    assert backend.submit(job) == known
    assert not controller.jobs


def test_the_state_of_a_job(backend, controller, job):
    known = backend.submit(job)
    folder = Path(known.directory)
    for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"):
        controller.jobs["40"]["state"] = state
        assert backend.poll(known).running
    controller.jobs["40"]["state"] = "NODE_FAIL"
    assert backend.poll(known) == JobStatus(running=False, reason="node fail")
    controller.jobs["40"]["state"] = "FAILED"
    (folder / "end").write_text("2\n")
    (folder / "log.txt").write_text("error: no such policy\n")
    status = backend.poll(known)
    assert (status.exit_status, status.reason) == (2, "exit status 2: error: no such policy")
    controller.jobs.clear()
    assert backend.poll(known) == status
    (folder / "end").write_text("0\n")
    assert backend.poll(known) == JobStatus(running=False, exit_status=0)
    (folder / "end").unlink()
    assert "no longer knows the job" in backend.poll(known).reason


def test_a_job_is_signalled_once_and_cancelled_in_the_end(backend, controller, job):
    known = backend.submit(job)
    controller.jobs["40"]["state"] = "RUNNING"
    for waited in (0.0, 30.0):
        backend.stop(known, waited)
    sent = [words for words in controller.calls if words[0] == "scancel"]
    assert sent == [("scancel", "--batch", "--signal=TERM", "40")]
    assert backend.poll(known).running
    backend.stop(known, CHECKPOINT_SECONDS)
    assert backend.poll(known).reason == "cancelled"
    controller.jobs.clear()
    backend.stop(known, CHECKPOINT_SECONDS)


def test_a_job_that_waits_is_cancelled_at_once(backend, controller, job):
    known = backend.submit(job)
    backend.stop(known, 0.0)
    assert controller.jobs["40"]["state"] == "CANCELLED"


def test_a_controller_that_does_not_answer(backend, controller, job):
    backend.check()
    known = backend.submit(job)
    controller.says = ProgramAnswer(1, "", AWAY)
    for call in (backend.check, lambda: backend.poll(known), lambda: backend.stop(known, 0.0)):
        with pytest.raises(BackendUnreachableError, match="backend slurm does not answer"):
            call()


def test_a_job_that_slurm_refuses(backend, controller, job):
    def refuse(words: list[str]) -> ProgramAnswer:
        return ProgramAnswer(1, "", "sbatch: error: invalid partition specified: gpu")

    controller.sbatch = refuse
    with pytest.raises(BackendError, match="invalid partition specified"):
        backend.submit(job)


def test_a_directory_that_cannot_be_created(backend, controller, tmp_path):
    (tmp_path / "file").touch()
    settings = backend.settings.model_copy(update={"folder": str(tmp_path / "file" / "jobs")})
    made = Slurm(backend.sweep, settings, controller)
    with pytest.raises(BackendError, match="write folder: and another one"):
        made.check()


PROGRAMS = {
    "scontrol": "echo node1",
    "srun": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "python": "{body}",
}


def run_script(
    tmp_path: Path, backend: Slurm, job: ScheduledJob, body: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """Run the script as a node would, with fake programs."""
    known = backend.submit(job)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        program = programs / name
        program.write_text("#!/bin/bash\n" + text.replace("{body}", body) + "\n")
        program.chmod(0o755)
    script = Path(known.directory, "job.sbatch")
    text = script.read_text().replace("export PATH=", "ignored=")
    script.write_text(text)
    path = f"{programs}:{os.environ['PATH']}"
    variables = {"SLURM_JOB_ID": "40", "SLURM_CPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2"}
    environment = {**os.environ, "PATH": path, "SLURM_JOB_NODELIST": "node[1-2]", **variables}
    return subprocess.Popen(["bash", str(script)], env=environment), Path(known.directory)


def test_the_script_keeps_the_exit_status(backend, job, tmp_path):
    body = 'echo "$RAY_ADDRESS $*" >seen; exit 7'
    script, folder = run_script(tmp_path, backend, job, body)
    assert script.wait(20) == 7
    assert (folder / "end").read_text() == "7\n"
    assert (folder / "begun").read_text() == "40\n"
    words = "-m gdpo_tune.sweep search_spaces/gpu.yaml --name nightly-1"
    assert (tmp_path / "seen").read_text() == f"node1:6379 {words}\n"


def test_the_script_signals_the_sweep_and_waits_for_its_checkpoints(backend, job, tmp_path):
    body = 'trap "sleep 0.5; touch saved; exit 130" TERM; touch ready; while :; do sleep 0.1; done'
    script, folder = run_script(tmp_path, backend, job, body)
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 130
    assert (tmp_path / "saved").exists()
    assert (folder / "end").read_text() == "130\n"
