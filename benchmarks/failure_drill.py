"""A scheduled sweep on a cluster that loses a node and then the driver, beside an undisturbed one.

    python benchmarks/failure_drill.py [--small]      needs `pip install 'gdpo-tune[cluster]'`

The cluster is two `ray start` nodes on this machine, with four logical CPUs each.
`gdpo-tune schedule sweeps/ run NAME --wait` submits through the Jobs API. Trials train the
embedded policy and take a CPU each. In the second sweep, all slots are taken and half of the trials
have a checkpoint when `kill -9` hits every process of the worker node. Once one of the lost trials
trains again, `kill -9` hits the driver; the schedule then submits its second attempt.

A trial is back when it writes its next line. The last trials of the lost node come back only after
the loss of the driver. Repeated steps are those after the trial's newest checkpoint. Every search
trial must have the results of the undisturbed sweep; replicates may differ, because the order in
which trials end decides which configurations get them. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from harness import run

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.support.killed_sweeps import SPACE, KilledSweep, read_steps_written
from tests.support.ray_nodes import (
    RayCluster,
    RayNode,
    make_short_directory,
    open_ray_cluster,
    read_command,
)
from tests.support.sweep_properties import (
    check_every_trial_once,
    check_no_trial_goes_back,
    collect_search_facts,
)

NODE = {"cpus": 4}
SLOTS, ON_A_NODE = 8, 4
TRIAL = "ray::ImplicitFunc"
"""Name of the process of a trial."""
LIMIT_SECONDS = 120.0
"""Most seconds until a lost trial is back."""
TICK = "2026-03-29T01:00:00+00:00"
RUN = "20260329T010000Z"
NIGHT = f"""extends: {SPACE}
name: night
search: {{sampler: random, budget: {{completions: 0}}, trials: TRIALS, merges: {{budget: 0}},
  checkpoints: {{budget: 0}}, replicates: {{per_point: 1, max_runs: 1}}}}
training: {{steps: STEPS, checkpoint_every: 5, validation_prompts: 32, test_prompts: 32}}
resources: {{cpus: 1}}
"""
SWEEP = """space: night.yaml
backend: {kind: ray-job, address: URL}
storage: STORAGE
tracking: TRACKING
"""
PATIENCE = 900.0
DYING_SECONDS = 2.0
"""Time until the trials of a killed driver are dead; lines written by then do not count."""


def list_trial_processes(node: RayNode) -> list[psutil.Process]:
    return [process for process in node.list_processes() if read_command(process).startswith(TRIAL)]


def find_driver(node: RayNode) -> psutil.Process:
    """Return the driver's process: the job itself, not the shell that started it."""
    (driver,) = [
        process
        for process in node.list_processes()
        if "-m gdpo_tune.sweep night.yaml" in read_command(process) and "sh" not in process.name()
    ]
    return driver


class Night(KilledSweep):
    """One run of a schedule."""

    @property
    def spec(self) -> SweepSpec:
        storage = [f"storage={self.directory / 'shared'}"]
        return load_spec(self.directory / "night.yaml", storage, name=f"night-{RUN}")

    def read_output(self) -> str:
        """Return the output of the schedule command so far."""
        return (self.directory / "output.txt").read_text()

    def list_running(self) -> list[int]:
        """Return the numbers of the trials that run."""
        with Ledger.open(self.spec, read_only=True) as ledger:
            return [record.number for record in ledger.get_records() if record.state == "running"]

    def list_incidents(self) -> list[Any]:
        """Return the incidents of all sessions of the sweep, in order."""
        with Ledger.open(self.spec, read_only=True) as ledger:
            return [one for session in ledger.get_sessions() for one in session["incidents"]]

    def find_lost(self) -> set[int]:
        """Return the numbers of the trials that a node has taken with it."""
        return {
            int(trial)
            for incident in self.list_incidents()
            if "was lost" in incident.description or "was cut off" in incident.description
            for trial in incident.trials
        }


@dataclass
class Watch:
    """Progress of all trials of a run, recorded by repeated polls."""

    night: Night
    process: subprocess.Popen[bytes]
    line_counts: dict[int, int] = field(default_factory=dict)
    """Trial -> number of lines that it has written."""
    writes: list[tuple[float, int]] = field(default_factory=list)
    """Time of each poll that saw new lines of a trial, and the trial."""

    @property
    def directories(self) -> list[Path]:
        return list((self.night.spec.directory / "trials").glob("*"))

    def record_progress(self) -> None:
        """Record which trials have written new lines."""
        for directory in self.directories:
            trial, count = int(directory.name), len(read_steps_written(directory))
            if count > self.line_counts.get(trial, 0):
                self.line_counts[trial] = count
                self.writes.append((time.monotonic(), trial))

    def find_first_writes(self, moment: float) -> dict[int, float]:
        """Return each trial that wrote after `moment`, and the seconds until its first line."""
        first: dict[int, float] = {}
        for when, trial in self.writes:
            if when > moment + DYING_SECONDS:
                first.setdefault(trial, when - moment)
        return first

    def measure_return(self, moment: float, trials: Collection[int]) -> dict[str, float]:
        """Return the seconds until the first and until the last of these trials wrote again."""
        writes = self.find_first_writes(moment)
        back = [seconds for trial, seconds in writes.items() if trial in trials]
        ends = {"first_back_seconds": min(back), "all_back_seconds": max(back)}
        return {name: round(seconds, 1) for name, seconds in ends.items()}

    def count_repeated_steps(self) -> int:
        """Count the lines whose step is in an earlier line of the same trial."""
        lines = map(read_steps_written, self.directories)
        return sum(len(steps) - len(set(steps)) for steps in lines)

    def wait(self, moment: Callable[[], bool]) -> None:
        """Wait until `moment` returns True; fail if the run ends first or takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not moment():
            self.record_progress()
            ended = self.process.poll() is not None
            if (ended and not moment()) or time.monotonic() > deadline:
                raise SystemExit(f"timed out\n{self.night.read_output()}")
            time.sleep(0.2)


def is_ready_for_fault(night: Night, cluster: RayCluster) -> bool:
    """Return whether all slots are taken and half of the trials have a checkpoint."""
    if any(len(list_trial_processes(node)) < ON_A_NODE for node in cluster.nodes):
        return False
    numbers = night.list_running()
    directories = [night.spec.directory / "trials" / str(number) for number in numbers]
    have = sum(find_newest_checkpoint(directory) is not None for directory in directories)
    return len(numbers) == SLOTS and have >= SLOTS // 2


def disturb(cluster: RayCluster, watch: Watch) -> dict[str, Any]:
    """Kill the node and then the driver; return lost trials and seconds until their return."""
    night, (head, other) = watch.night, cluster.nodes
    watch.wait(lambda: is_ready_for_fault(night, cluster))
    watch.record_progress()
    other.kill()
    cluster.nodes.remove(other)
    killed = time.monotonic()
    watch.record_progress()
    # with half of the slots gone, lost trials wait until running ones have ended
    watch.wait(lambda: bool(night.find_lost() & watch.find_first_writes(killed).keys()))
    lost, again, under_way = night.find_lost(), watch.count_repeated_steps(), night.list_running()
    find_driver(head).kill()
    driver_killed = time.monotonic()
    watch.wait(lambda: watch.process.poll() is not None)
    driver_again = watch.count_repeated_steps() - again
    node = {"trials": sorted(lost), "steps_again": again, **watch.measure_return(killed, lost)}
    driver = {"trials": under_way, "steps_again": driver_again}
    return {"node": node, "driver": driver | watch.measure_return(driver_killed, under_way)}


def run_sweep(
    directory: Path, ray: Path, steps: int, trials: int, *, disturbed: bool
) -> tuple[Night, dict[str, Any]]:
    """Run the sweep from start to end on its own cluster; return it and its figures."""
    figures: dict[str, Any] = {}
    with open_ray_cluster(ray) as cluster:
        head = cluster.start_head(dashboard=True, **NODE)
        cluster.add_node(**NODE)
        night = write_files(directory, cluster.url, steps, trials)
        began = time.monotonic()
        with run_schedule(night) as process:
            watch = Watch(night, process)
            if disturbed:
                figures = disturb(cluster, watch)
            status = process.wait(PATIENCE)
        if status:
            raise SystemExit(f"the run ended with {status}\n{night.read_output()}")
        figures["wall_seconds"] = round(time.monotonic() - began, 1)
        zombies = [process for process in head.list_processes() if process.status() == "zombie"]
        figures["processes_left"] = len([*list_trial_processes(head), *zombies])
    check_every_trial_once(night)
    check_no_trial_goes_back(night)
    figures["trials"] = len(watch.directories)
    figures["steps_again"] = watch.count_repeated_steps()
    print(night.read_output(), *map(str, night.list_incidents()), sep="\n")
    return night, figures


def write_files(directory: Path, url: str, steps: int, trials: int) -> Night:
    """Write the search space and the schedule file, as a user writes them."""
    (directory / "sweeps").mkdir(parents=True)
    space = NIGHT.replace("STEPS", str(steps)).replace("TRIALS", str(trials))
    (directory / "night.yaml").write_text(space)
    sweep = SWEEP.replace("URL", url).replace("STORAGE", str(directory / "shared"))
    sweep = sweep.replace("TRACKING", f"sqlite:///{directory}/mlflow.db")
    (directory / "sweeps" / "night.yaml").write_text(sweep)
    return Night(directory, (), fake=False)


@contextmanager
def run_schedule(night: Night) -> Iterator[subprocess.Popen[bytes]]:
    """Run the schedule command that submits the run and supervises it; kill it at the end."""
    words = f"-m gdpo_tune.schedule sweeps/ run night --at {TICK} --wait --every 2".split()
    environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with (night.directory / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=night.directory,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def list_differences(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Print and return the differences between the trials of two runs, one line each."""
    lines = [
        f"trial {one['number']}: {key} = {one[key]}, not {other[key]}"
        for one, other in zip(some, others, strict=False)
        for key in one
        if one[key] != other[key]
    ]
    print(*lines, sep="\n")
    return lines + [f"{len(some)} trials, not {len(others)}"] * (len(some) != len(others))


def measure(steps: int = 60, trials: int = 14) -> dict[str, Any]:
    """Run both sweeps and compare them; exit status 1 if a limit is not met."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as name, make_short_directory() as short:
        runs: list[tuple[Night, dict[str, Any]]] = []
        for each, disturbed in (("whole", False), ("cut", True)):
            (short / each[0]).mkdir()
            directory = Path(name) / each
            runs.append(run_sweep(directory, short / each[0], steps, trials, disturbed=disturbed))
        (whole, undisturbed), (cut, figures) = runs
        differing = list_differences(collect_search_facts(cut), collect_search_facts(whole))
    back = max(figures[fault]["first_back_seconds"] for fault in ("node", "driver"))
    figures |= {
        "slots": SLOTS,
        "undisturbed_wall_seconds": undisturbed["wall_seconds"],
        "same_trials": not differing,
        "differences": len(differing),
        "limit_back_seconds": LIMIT_SECONDS,
        "ok": not differing and not figures["processes_left"] and back <= LIMIT_SECONDS,
    }
    if not figures["ok"]:
        raise SystemExit(json.dumps(figures))
    return figures


if __name__ == "__main__":
    run(measure, {"steps": 30, "trials": 12})
