"""Jobs of Slurm by fake commands, and scripts that run without Slurm."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

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
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.render import SLURM
from tests.support.schedule import Clock, load_scheduled_sweep

GONE = "slurm_load_jobs error: Invalid job id specified"
NO_ACCOUNTING = "Slurm accounting storage is disabled"


@dataclass
class SlurmJob:
    """A job that a controller knows."""

    name: str
    state: str
    cluster: str
    script: str


@dataclass
class SlurmPrograms:
    """sbatch, squeue, sacct, scancel and scontrol of a site with one or several clusters."""

    clusters: Sequence[str] = ()
    """Names of its clusters; empty: one, which no command has to name."""
    banner: str = ""
    """What the site's wrappers print before each answer of sbatch."""
    accounting: bool = True
    jobs: dict[str, SlurmJob] = field(default_factory=dict[str, SlurmJob])
    """Number -> job, as long as the controllers know it; `purge` forgets one."""
    records: dict[str, SlurmJob] = field(default_factory=dict[str, SlurmJob])
    """The same in the accounting's database, for ever."""
    calls: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    says: ProgramResult | None = None
    """The answer to every call, instead of the usual ones."""

    def __call__(self, backend: str, words: Sequence[str], text: str) -> ProgramResult:
        self.calls.append(words)
        return self.says or getattr(self, words[0])(list(words[1:]))

    def purge(self, number: str) -> None:
        """Forget a job, as a controller does MinJobAge (300 s) after its end."""
        del self.jobs[number]

    def scontrol(self, words: list[str]) -> ProgramResult:
        return ProgramResult(0, "Slurmctld(primary) at head is UP\n", "")

    def sbatch(self, words: list[str]) -> ProgramResult:
        """sbatch(1): options of the command line count more than those of the script.

        `--parsable`: only the job's number and, if the command names clusters, `;` and its cluster.
        """
        script = Path(words[-1])
        lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
        in_script = [word for line in lines for word in shlex.split(line)[1:]]
        options = read_options([*in_script, *words[:-1]], "--job-name", "-M", "--clusters")
        assert "--parsable" in words
        named = (options["clusters"] or options["M"] or "").split(",")
        chosen = next((name for name in self.clusters if name in named), "")
        number = str(40 + len(self.records))
        job = SlurmJob(options["job_name"] or script.name, "PENDING", chosen, str(script))
        self.jobs[number] = self.records[number] = job
        answer = f"{number};{chosen}" if chosen else number
        return ProgramResult(0, f"{self.banner}{answer}\n", "")

    def squeue(self, words: list[str]) -> ProgramResult:
        """squeue(1): a number that its controller does not have is an error, a name is not."""
        options = read_options(words, "--jobs", "--name", "--clusters", "--format", "--states")
        seen = {
            number: job
            for number, job in self.jobs.items()
            if not job.cluster or job.cluster in (options["clusters"] or "").split(",")
        }
        if options["jobs"] is not None and options["jobs"] not in seen:
            return ProgramResult(1, "", GONE)
        rows = [
            {"%i %o": f"{number} {job.script}", "%T": job.state}[options["format"]]
            for number, job in seen.items()
            if options["jobs"] in (None, number) and options["name"] in (None, job.name)
        ]
        return ProgramResult(0, "".join(f"{row}\n" for row in rows), "")

    def sacct(self, words: list[str]) -> ProgramResult:
        """sacct(1): no record is no error; a cancelled job names who did it."""
        if not self.accounting:
            return ProgramResult(1, "", NO_ACCOUNTING)
        options = read_options(words, "--jobs", "--name", "--clusters", "--format")
        assert {"--allocations", "--parsable2", "--noheader"} <= set(words)
        assert options["format"] == "State"
        job = self.records.get(options["jobs"] or "")
        if job is None or job.name != options["name"]:
            return ProgramResult(0, "", "")
        return ProgramResult(0, job.state + " by 1000" * (job.state == "CANCELLED") + "\n", "")

    def scancel(self, words: list[str]) -> ProgramResult:
        options = read_options(words, "--clusters", "--signal")
        job = self.jobs.get(words[-1])
        if job is None or (job.cluster and job.cluster != options["clusters"]):
            return ProgramResult(1, "", f"scancel: error: Kill job error on {words[-1]}: {GONE}")
        if options["signal"] is None:
            job.state = "CANCELLED"
        return ProgramResult(0, "", "")


def read_options(words: Sequence[str], *names: str) -> dict[str, str | None]:
    """Return the values of options of a command line as getopt reads them; the last one counts."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in names:
        parser.add_argument(name)
    return vars(parser.parse_known_args(words)[0])


UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.fixture
def controller() -> SlurmPrograms:
    return SlurmPrograms()


@pytest.fixture
def backend(tmp_path, controller) -> Slurm:
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    return Slurm(sweep, sweep.settings.backend, controller)


@pytest.fixture
def job(backend) -> ScheduledJob:
    arguments = (backend.sweep.settings.space, "--name", "nightly-1")
    return ScheduledJob("nightly-1-a1", "nightly-1", arguments, backend.sweep.root)


@pytest.fixture
def known(backend: Slurm, job: ScheduledJob) -> JobHandle:
    return backend.submit(job)


def test_a_job_is_submitted_once(backend, controller, job, tmp_path):
    known = [backend.submit(job) for _ in range(2)]
    folder = tmp_path / "runs" / ".schedule" / "nightly" / "jobs" / "nightly-1-a1"
    assert known[0] == known[1]
    assert (known[0].id, known[0].directory) == ("40", str(folder))
    (submitted,) = controller.jobs.values()
    script = Path(submitted.script).read_text()
    for option in ("--nodes=2", "--exclusive", "--gpus-per-node=4", "--partition=gpu", "--requeue"):
        assert f"#SBATCH {option}\n" in script
    assert "#SBATCH --time=10:15:00\n" in script
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
    known = []
    for name in ("one", "two"):
        sweep = load_scheduled_sweep(tmp_path / name, SLURM)
        backend = Slurm(sweep, sweep.settings.backend, controller)
        known.append(backend.submit(job))
        (Path(known[-1].directory) / "id").unlink()
        assert backend.submit(job) == known[-1]
    assert [each.id for each in known] == ["40", "41"]


def test_the_state_of_a_job(backend, controller, known):
    folder = Path(known.directory)
    for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"):
        controller.jobs["40"].state = state
        assert backend.poll(known) == JobStatus(running=True)
    controller.jobs["40"].state = "NODE_FAIL"
    assert backend.poll(known) == JobStatus(running=False, reason="node fail")
    controller.jobs["40"].state = "FAILED"
    (folder / "end").write_text("2\n")
    (folder / "log.txt").write_text("error: no such policy\n")
    status = backend.poll(known)
    assert (status.exit_status, status.reason) == (2, "exit status 2: error: no such policy")
    controller.purge("40")
    assert backend.poll(known) == status
    (folder / "end").write_text("0\n")
    assert backend.poll(known) == JobStatus(running=False, exit_status=0)


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
    ("record", "status"),
    [
        ("CANCELLED", JobStatus(running=False, reason="cancelled")),
        ("TIMEOUT", JobStatus(running=False, reason="timeout")),
        ("COMPLETED", JobStatus(running=False, reason="completed")),
    ],
)
def test_the_accounting_knows_how_a_job_ended_that_the_controller_has_forgotten(
    backend, controller, record, status, known
):
    """slurm.conf(5): after MinJobAge, 300 s, the controller forgets; sacct(1): for `CANCELLED` it
    adds by whom."""
    controller.jobs["40"].state = record
    controller.purge("40")
    assert backend.poll(known) == status


def be_without_accounting(controller: SlurmPrograms) -> None:
    controller.accounting = False
    controller.purge("40")


def be_lost(controller: SlurmPrograms) -> None:
    controller.jobs["40"].state = "RUNNING"
    controller.purge("40")


def say_something_else(controller: SlurmPrograms) -> None:
    controller.jobs["40"].state = "a maintenance begins at 8"


@pytest.mark.parametrize("make_unclear", [be_without_accounting, be_lost, say_something_else])
def test_an_answer_that_is_not_understood_is_no_end(backend, controller, job, make_unclear, known):
    """squeue(1), "Invalid job id": also said of a job of another cluster. sacctmgr(1), "runaway
    jobs": the accounting says RUNNING of a job whose end it has missed."""
    controller.jobs["40"].state = "RUNNING"
    make_unclear(controller)
    status = backend.poll(known)
    assert status.running
    reason, _, way = status.reason.partition("; if it has ended, run: ")
    assert reason.startswith("the state of Slurm's job 40 is unknown (")
    subprocess.run(way, shell=True, check=True)
    assert backend.poll(known).exit_status == 1
    assert not backend.poll(known).running


def test_a_state_of_later_versions_is_shown_and_decides_nothing(tmp_path, controller):
    clock = Clock()
    sweep = load_scheduled_sweep(tmp_path, SLURM)
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
    assert backend.poll(known) == JobStatus(running=True)
    # what earlier versions have kept: no cluster
    earlier = known.model_copy(update={"id": f"{banner}40"})
    if chosen == "gpu":
        assert backend.poll(earlier) == JobStatus(running=True)
    backend.stop(known, CHECKPOINT_SECONDS)
    assert backend.poll(known).reason == "cancelled"
    controller.purge("40")
    assert backend.poll(known).reason == "cancelled"


def test_a_job_that_another_cluster_of_a_federation_has_started(backend, controller, known):
    """squeue(1): REVOKED, "sibling was removed from cluster due to other cluster starting"."""
    controller.jobs["40"].state = "REVOKED"
    assert "unknown ('REVOKED')" in backend.poll(known).reason
    squeue = controller.squeue

    def show_federation(words: list[str]) -> ProgramResult:
        return ProgramResult(0, "RUNNING\n", "") if "--federation" in words else squeue(words)

    controller.squeue = show_federation
    assert backend.poll(known) == JobStatus(running=True)


def test_a_number_that_begins_again_belongs_to_another_job(backend, controller, known):
    """slurm.conf(5), MaxJobId: "once this value is reached, job numbers begin at FirstJobId"."""
    controller.jobs["40"].name = controller.records["40"].name = "of somebody else"
    assert "unknown" in backend.poll(known).reason


def test_an_answer_of_sbatch_without_an_id_makes_no_second_job(backend, controller, job):
    """sbatch(1), `--quiet`: "suppress informational messages", so it may print nothing."""
    sbatch = controller.sbatch
    controller.sbatch = lambda words: sbatch(words) and ProgramResult(0, "have a nice day\n", "")
    listed = controller.squeue
    controller.squeue = lambda words: ProgramResult(0, "", "")
    for _ in range(2):
        with pytest.raises(
            BackendUnreachableError, match="'have a nice day'\n    fix: write the id"
        ):
            backend.submit(job)
    assert list(controller.jobs) == ["40"]
    controller.squeue = listed
    assert backend.submit(job).id == "40"


@pytest.mark.parametrize(
    "option",
    [
        *("--array=1-3", "-a 1-3", "-a1", "--arr=1", "--mem=1G --array 1-3", "--wait", "-W"),
        "--nodes=1 : --nodes=2",
    ],
)
def test_options_that_make_several_jobs_or_wait_are_refused(tmp_path, option):
    """sbatch(1): `--array`, heterogeneous jobs by ` : `, `--wait`; getopt_long(3): beginnings."""
    text = SLURM.replace("partition: gpu", f"partition: gpu, options: [{json.dumps(option)}]")
    sweep = load_scheduled_sweep(tmp_path, SLURM)
    sweep.file.write_text(text)
    (problem,) = load_sweeps(sweep.file).error.problems
    assert (problem.where, problem.key) == (f"{sweep.file}:5", "backend.options")
    assert option in problem.reason
    for other in ("--wait-all-nodes=1", "--account=a", "--constraint=a100", "--comment=a:b"):
        sweep.file.write_text(text.replace(option, other))
        assert load_sweeps(sweep.file).error is None


def test_variables_of_the_job_in_which_tick_runs_are_not_passed_on(tmp_path, monkeypatch):
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


def test_the_script_unsets_what_srun_would_take_for_its_own_options(backend, job, tmp_path):
    """A line of scrontab runs in a job, whose variables its sbatch passes on: scrontab(1)."""
    body = 'env | grep -E "^(SLURM|SRUN|PMI)" >seen; exit 0'
    leaked = {"SLURM_CPU_BIND_LIST": "0x3", "SLURM_MEM_PER_CPU": "2", "SLURM_CPUS_PER_TASK": "2"}
    leaked |= {"SLURM_NTASKS": "8", "SRUN_CPUS_PER_TASK": "2", "PMI_SIZE": "8"}
    script, _ = run_script(tmp_path, backend, job, body, leaked)
    assert script.wait(20) == 0
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_JOB_ID=40" in seen
    assert not [name for name in leaked if f"{name}=" in seen]


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


def test_a_controller_that_does_not_answer(backend, controller, job):
    backend.check()
    known = backend.submit(job)
    controller.says = ProgramResult(1, "", UNREACHABLE)
    for call in (backend.check, lambda: backend.poll(known), lambda: backend.stop(known, 0.0)):
        with pytest.raises(BackendUnreachableError, match="backend slurm does not answer"):
            call()


def test_a_job_that_slurm_refuses(backend, controller, job):
    def refuse(words: list[str]) -> ProgramResult:
        return ProgramResult(1, "", "sbatch: error: invalid partition specified: gpu")

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
    tmp_path: Path,
    backend: Slurm,
    job: ScheduledJob,
    body: str,
    surrounding: Mapping[str, str] = MappingProxyType({}),
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
    environment = {
        **os.environ,
        **surrounding,
        "PATH": path,
        "SLURM_JOB_NODELIST": "node[1-2]",
        **variables,
    }
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
