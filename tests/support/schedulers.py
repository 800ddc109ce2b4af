"""Schedulers of jobs in memory, behind the programs and the client that backends call."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML

from gdpo_tune.clusters.backends.base import ProgramResult, ScheduledJob
from gdpo_tune.clusters.load_schedules import ScheduledSweep, list_overrides

RUN = "nightly-20260329T010000Z"


def build_job(sweep: ScheduledSweep) -> ScheduledJob:
    """Build the first attempt of a run, as the schedule does."""
    overrides = list_overrides(sweep.settings, sweep.root)
    words = [word for override in overrides for word in ("--set", override)]
    arguments = (sweep.settings.space, "--name", RUN, *words)
    return ScheduledJob(f"{RUN}-a1", RUN, arguments, sweep.root)


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


class KubernetesJobs:
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
