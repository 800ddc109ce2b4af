"""Jobs of Slurm by fake commands, and scripts that run without Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gdpo_tune.clusters.backends.base import (
    CHECKPOINT_SECONDS,
    JobStatus,
    ProgramResult,
    ScheduledJob,
    call_program,
)
from gdpo_tune.clusters.backends.slurm import Slurm
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.outcome import RunFigures
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.render import SLURM
from tests.support.schedule import Clock, load_scheduled_sweep
from tests.support.schedulers import SlurmPrograms

RUNNING = JobStatus(running=True)


@pytest.fixture
def controller():
    return SlurmPrograms()


@pytest.fixture
def backend(tmp_path, controller):
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    return Slurm(sweep, sweep.settings.backend, controller)


@pytest.fixture
def job(backend):
    arguments = (backend.sweep.settings.space, "--name", "nightly-1")
    return ScheduledJob("nightly-1-a1", "nightly-1", arguments, backend.sweep.root)


@pytest.fixture
def known(backend, job):
    return backend.submit(job)


def test_what_is_submitted(controller, known, tmp_path):
    folder = tmp_path / "runs" / ".schedule" / "nightly" / "jobs" / "nightly-1-a1"
    assert (known.id, known.directory) == ("40", str(folder))
    script = Path(controller.jobs["40"].script).read_text()
    options = "--nodes=2 --exclusive --gpus-per-node=4 --partition=gpu --requeue --time=10:15:00"
    assert {f"#SBATCH {option}" for option in options.split()} <= {*script.splitlines()}
    assert "python -m gdpo_tune.sweep search_spaces/gpu.yaml --name nightly-1 &" in script


def test_a_caller_that_was_killed_leaves_nothing_to_clean_up(backend, controller, job, known):
    folder = Path(known.directory)
    (folder / "id").unlink()  # killed before it was written: the job is in the queue
    assert backend.submit(job) == known
    controller.jobs.clear()
    (folder / "begun").write_text("40\n")  # ended meanwhile, and Slurm has forgotten it
    assert backend.submit(job) == known
    assert not controller.jobs


def test_a_job_is_known_by_the_real_path_of_its_script(backend, controller, job, tmp_path, known):
    """squeue(1), `%o`: a home directory behind a link has two paths (path_resolution(7))."""
    Path(known.directory, "id").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    script = Path(controller.jobs["40"].script)
    controller.jobs["40"].script = str(tmp_path / "link" / script.relative_to(tmp_path / "runs"))
    assert backend.submit(job) == known
    assert len(controller.records) == 1


def test_a_job_of_another_project_with_this_name_is_not_ours(tmp_path, controller, job):
    """squeue(1), `--name`: the jobs of a user may share a name; `%o` is the script of each."""
    for name, number in (("one", "40"), ("two", "41")):
        sweep = load_scheduled_sweep(tmp_path / name, SLURM)
        backend = Slurm(sweep, sweep.settings.backend, controller)
        known = backend.submit(job)
        (Path(known.directory) / "id").unlink()
        assert backend.submit(job) == known
        assert known.id == number


@pytest.mark.parametrize("content", ["", "done\n", "1\n2\n"])
def test_a_file_that_a_person_has_written_wrongly_is_no_end(backend, controller, content, known):
    """The message about an unknown state asks for that file; a status is a number (exit(3))."""
    controller.purge("40")
    controller.records.clear()
    Path(known.directory, "end").write_text(content)
    status = backend.poll(known)
    assert status.running
    assert "if it has ended, run: echo 1 >" in status.reason


@pytest.mark.parametrize(
    ("state", "accounting", "forgotten"),
    [
        ("RUNNING", False, True),
        ("RUNNING", True, True),
        ("a maintenance begins at 8", True, False),
        # squeue(1): REVOKED, "sibling was removed from cluster due to other cluster starting"
        ("REVOKED", True, False),
    ],
)
def test_an_answer_that_is_not_understood_is_no_end(
    backend, controller, known, state, accounting, forgotten
):
    """squeue(1), "Invalid job id": also said of a job of another cluster. sacctmgr(1), "runaway
    jobs": the accounting says RUNNING of a job whose end it has missed."""
    controller.jobs["40"].state, controller.accounting = state, accounting
    if forgotten:
        controller.purge("40")
    status = backend.poll(known)
    assert status.running
    reason, _, way = status.reason.partition("; if it has ended, run: ")
    said = "neither squeue nor sacct knows it" if forgotten else state
    assert reason == f"the state of Slurm's job 40 is unknown ({said!r})"
    subprocess.run(way, shell=True, check=True)
    assert (backend.poll(known).exit_status, backend.poll(known).running) == (1, False)


def test_a_job_that_another_cluster_of_a_federation_has_started(backend, controller, known):
    controller.jobs["40"].state = "REVOKED"
    squeue, running = controller.squeue, ProgramResult(0, "RUNNING\n", "")
    controller.squeue = lambda words: running if "--federation" in words else squeue(words)
    assert backend.poll(known) == RUNNING


def test_a_number_that_begins_again_belongs_to_another_job(backend, controller, known):
    """slurm.conf(5), MaxJobId: "once this value is reached, job numbers begin at FirstJobId"."""
    controller.jobs["40"].name = controller.records["40"].name = "of somebody else"
    assert "unknown" in backend.poll(known).reason


def test_a_state_of_later_versions_is_shown_and_decides_nothing(tmp_path, controller):
    clock, sweep = Clock(), load_scheduled_sweep(tmp_path, SLURM)
    context = SweepScheduler.open(sweep, clock)
    context.build_backend = lambda _: Slurm(sweep, sweep.settings.backend, controller)
    context.read_figures = lambda *_: RunFigures()
    context.run(clock(), wait=False)
    controller.jobs["40"].state = "TELEPORTING"
    for _ in range(3):
        context.tick()
    kinds = [event.kind for event in context.events]
    assert kinds == ["started", "submitted", "state_changed", "seen"]
    assert "unknown ('TELEPORTING')" in context.state.active.state_problem
    controller.jobs["40"].state = "RUNNING"
    context.tick()
    assert context.state.active.state_problem == ""
    assert list(controller.jobs) == ["40"]


WELCOME = "-----------------\nWelcome to the supercomputer of 1998\n--> Verifying valid host...OK\n"


@pytest.mark.parametrize("banner", ["", WELCOME])
@pytest.mark.parametrize(
    "option", ["--clusters=cpu,gpu", "-M gpu", "-Mgpu", "--cluster gpu", '--clusters="gpu"']
)
def test_a_site_with_several_clusters(tmp_path, job, banner, option):
    """sbatch(1), `--parsable`: "the job id number and the cluster name if present", separated by a
    semicolon. squeue(1), scancel(1), sacct(1): `--clusters` names those that are asked."""
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    settings = sweep.settings.backend.model_copy(update={"options": (option,)})
    controller = SlurmPrograms(clusters=("cpu", "gpu"), banner=banner)
    backend = Slurm(sweep, settings, controller)
    known = backend.submit(job)
    chosen = "cpu" if "cpu" in option else "gpu"
    assert known.id == f"40;{chosen}"
    (Path(known.directory) / "id").unlink()  # the caller was killed before it wrote it
    assert backend.submit(job) == known
    controller.jobs["40"].state = "RUNNING"
    assert backend.poll(known) == RUNNING
    if chosen == "gpu":  # what earlier versions have kept: no cluster
        assert backend.poll(known.model_copy(update={"id": f"{banner}40"})) == RUNNING
    backend.stop(known, CHECKPOINT_SECONDS)
    assert backend.poll(known).reason == "cancelled"
    controller.purge("40")
    assert backend.poll(known).reason == "cancelled"


def test_an_answer_of_sbatch_without_an_id_makes_no_second_job(backend, controller, job):
    """sbatch(1), `--quiet`: "suppress informational messages", so it may print nothing."""
    sbatch, listed = controller.sbatch, controller.squeue
    controller.sbatch = lambda words: sbatch(words) and ProgramResult(0, "have a nice day\n", "")
    controller.squeue = lambda words: ProgramResult(0, "", "")
    unclear = "'have a nice day'\n    fix: write the id"
    for _ in range(2):
        with pytest.raises(BackendUnreachableError, match=unclear):
            backend.submit(job)
    assert list(controller.jobs) == ["40"]
    controller.squeue = listed
    assert backend.submit(job).id == "40"


SEVERAL = ("--array=1-3", "-a 1-3", "-a1", "--arr=1", "--mem=1G --array 1-3", "--wait", "-W")


@pytest.mark.parametrize("option", [*SEVERAL, "--nodes=1 : --nodes=2"])
def test_options_that_make_several_jobs_or_wait_are_refused(tmp_path, option):
    """sbatch(1): `--array`, heterogeneous jobs by ` : `, `--wait`; getopt_long(3): beginnings."""
    text = SLURM.replace("partition: gpu", f"partition: gpu, options: [{json.dumps(option)}]")
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    sweep.file.write_text(text)
    (problem,) = load_sweeps(sweep.file).error.problems
    assert (problem.where, problem.key) == (f"{sweep.file}:5", "backend.options")
    assert option in problem.reason


def test_options_that_look_like_them_are_taken(tmp_path):
    options = '["--wait-all-nodes=1", "--account=a", "--constraint=a100", "--comment=a:b"]'
    load_scheduled_sweep(tmp_path, SLURM.replace("partition: gpu", f"options: {options}"))


def test_variables_of_the_job_in_which_tick_runs_are_not_passed_on(monkeypatch):
    """sbatch(1), `--export`: "SLURM_* variables are always propagated"; srun(1), input variables:
    SLURM_CPU_BIND, SLURM_MEM_PER_CPU and others are its options."""
    leaked = ("SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "SBATCH_EXPORT", "PMI_SIZE")
    leaked += ("OMPI_COMM_WORLD_SIZE", "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "SRUN_DEBUG")
    kept = ("SLURM_CONF", "SLURM_JWT", "SBATCH_ACCOUNT", "SLURM_CLUSTERS", "RAY_AUTH_TOKEN")
    for name in (*leaked, *kept):
        monkeypatch.setenv(name, "x")
    seen = set(call_program("slurm", ["env"]).out.splitlines())
    assert {f"{name}=x" for name in kept} <= seen
    assert not {f"{name}=x" for name in leaked} & seen


def test_a_job_is_signalled_once_and_cancelled_in_the_end(backend, controller, known):
    controller.jobs["40"].state = "RUNNING"
    for waited in (0.0, 30.0):
        backend.stop(known, waited)
    sent = [words for words in controller.calls if words[0] == "scancel"]
    assert sent == [("scancel", "--batch", "--signal=TERM", "40")]
    assert backend.poll(known).running
    backend.stop(known, CHECKPOINT_SECONDS)
    assert backend.poll(known).reason == "cancelled"
    controller.jobs.clear()
    backend.stop(known, CHECKPOINT_SECONDS)


def test_a_job_that_waits_is_cancelled_at_once(backend, controller, known):
    backend.stop(known, 0.0)
    assert controller.jobs["40"].state == "CANCELLED"


def test_a_directory_that_cannot_be_created(backend, controller, tmp_path):
    (tmp_path / "file").touch()
    settings = backend.settings.model_copy(update={"folder": str(tmp_path / "file" / "jobs")})
    with pytest.raises(BackendError, match="write folder: and another one"):
        Slurm(backend.sweep, settings, controller).check()


# The script, as a node would run it, with fake programs

PROGRAMS = {
    "scontrol": "echo node1",
    "srun": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
}
SLURM_VARIABLES = {
    "SLURM_JOB_ID": "40",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
}


@pytest.fixture
def start_script(tmp_path, known):
    """Start the script of a job whose sweep has this body."""

    def start(body, **surrounding):
        (tmp_path / "bin").mkdir()
        for name, text in {**PROGRAMS, "python": body}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        script = Path(known.directory, "job.sbatch")
        script.write_text(script.read_text().replace("export PATH=", "ignored="))
        path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        environment = {**os.environ, **surrounding, **path, **SLURM_VARIABLES}
        return subprocess.Popen(["bash", str(script)], env=environment)

    return start


def test_the_script_keeps_the_exit_status(start_script, known, tmp_path):
    assert start_script('echo "$RAY_ADDRESS $*" >seen; exit 7').wait(20) == 7
    assert Path(known.directory, "end").read_text() == "7\n"
    assert Path(known.directory, "begun").read_text() == "40\n"
    words = "-m gdpo_tune.sweep search_spaces/gpu.yaml --name nightly-1"
    assert (tmp_path / "seen").read_text() == f"node1:6379 {words}\n"


def test_the_script_unsets_what_srun_would_take_for_its_own_options(start_script, tmp_path):
    """A line of scrontab runs in a job, whose variables its sbatch passes on: scrontab(1)."""
    leaked = {"SLURM_CPU_BIND_LIST": "0x3", "SLURM_MEM_PER_CPU": "2", "SLURM_CPUS_PER_TASK": "2"}
    leaked |= {"SLURM_NTASKS": "8", "SRUN_CPUS_PER_TASK": "2", "PMI_SIZE": "8"}
    script = start_script('env | grep -E "^(SLURM|SRUN|PMI)" >seen; exit 0', **leaked)
    assert script.wait(20) == 0
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_JOB_ID=40" in seen
    assert not [name for name in leaked if f"{name}=" in seen]


def test_the_script_signals_the_sweep_and_waits_for_its_checkpoints(start_script, known, tmp_path):
    body = 'trap "sleep 0.5; touch saved; exit 130" TERM; touch ready; while :; do sleep 0.1; done'
    script, deadline = start_script(body), time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 130
    assert (tmp_path / "saved").exists()
    assert Path(known.directory, "end").read_text() == "130\n"
