"""A scheduled sweep on a cluster that loses a node and then the driver, beside an undisturbed one.

    python benchmarks/failure_drill.py [--small]

The cluster is two `ray start` nodes on this machine, with four logical CPUs each. The benchmark
runs `python -m gdpo_tune.schedule sweeps/ run NAME --wait`, which submits through the Jobs API.
Trials train the embedded policy and take a CPU, so eight fill the cluster. The first sweep is
undisturbed. In the second one, all slots are taken and half of the trials have a checkpoint when
`kill -9` hits every process of the worker node. Once one of the lost trials trains again, `kill -9`
hits the driver. The schedule then submits its second attempt.

A trial is lost at the last step that it has written, and is back when it writes the next line. The
last trials of the lost node come back only after the loss of the driver. Repeated steps are those
after the trial's newest checkpoint.

The last line is JSON: for both faults the lost trials and the seconds until they are back, the wall
times of both sweeps, and whether each search trial has the same results as in the undisturbed
sweep. The order in which trials end decides which configurations get replicates, so replicates may
differ.
Needs `pip install 'gdpo-tune[cluster]'`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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


def is_ready_for_fault(night: Night, cluster: RayCluster) -> bool:
    """Return whether all slots are taken and half of the trials have a checkpoint."""
    if any(len(list_trial_processes(node)) < ON_A_NODE for node in cluster.nodes):
        return False
    numbers = list_running_trials(night)
    directories = [night.spec.directory / "trials" / str(number) for number in numbers]
    have = sum(find_newest_checkpoint(directory) is not None for directory in directories)
    return len(numbers) == SLOTS and have >= SLOTS // 2


def disturb(
    night: Night, process: subprocess.Popen[bytes], cluster: RayCluster, watch: Watch
) -> dict[str, Any]:
    """Kill the node and then the driver; return lost trials and seconds until their return."""
    head, other = cluster.nodes
    wait(night, process, watch, lambda: is_ready_for_fault(night, cluster))
    watch.record_progress()
    other.kill()
    cluster.nodes.remove(other)
    killed = time.monotonic()
    watch.record_progress()

    # with half of the slots gone, lost trials wait until running ones have ended
    wait(
        night,
        process,
        watch,
        lambda: bool(find_lost_trials(night) & watch.find_first_writes(killed).keys()),
    )
    lost, again = sorted(map(int, find_lost_trials(night))), watch.count_repeated_steps()
    under_way = list_running_trials(night)
    find_driver(head).kill()
    driver_killed = time.monotonic()
    wait(night, process, watch, lambda: process.poll() is not None)
    node = {"trials": lost, "steps_again": again, **compute_return_seconds(watch, killed, lost)}
    driver = {"trials": under_way, "steps_again": watch.count_repeated_steps() - again}
    driver |= compute_return_seconds(watch, driver_killed, under_way)
    return {"node": node, "driver": driver}


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


def run_sweep(
    directory: Path, ray: Path, steps: int, trials: int, *, disturbed: bool
) -> tuple[Night, dict[str, Any]]:
    """Run the sweep from start to end on its own cluster; return it and its figures."""
    figures: dict[str, Any] = {}
    with open_ray_cluster(ray) as cluster:
        head = cluster.start_head(dashboard=True, **NODE)
        cluster.add_node(**NODE)
        night = write_files(directory, cluster.url, steps, trials)
        watch = Watch(night.spec.directory / "trials")
        began = time.monotonic()
        with run_schedule(night) as process:
            if disturbed:
                figures = disturb(night, process, cluster, watch)
            status = process.wait(PATIENCE)
        if status:
            raise SystemExit(f"the run ended with {status}\n{read_output(night)}")
        figures["wall_seconds"] = round(time.monotonic() - began, 1)
        remaining = [
            *list_trial_processes(head),
            *(p for p in head.list_processes() if p.status() == "zombie"),
        ]
        figures["processes_left"] = len(remaining)
    check_every_trial_once(night)
    check_no_trial_goes_back(night)
    figures["trials"] = len(list(watch.trials.iterdir()))
    figures["steps_again"] = watch.count_repeated_steps()
    print(read_output(night), *(str(incident) for incident in list_incidents(night)), sep="\n")
    return night, figures


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


class Night(KilledSweep):
    """One run of a schedule."""

    @property
    def spec(self) -> SweepSpec:
        return load_spec(
            self.directory / "night.yaml",
            [f"storage={self.directory / 'shared'}"],
            name=f"night-{RUN}",
        )


@dataclass
class Watch:
    """Progress of all trials, recorded by repeated polls."""

    trials: Path
    line_counts: dict[str, int] = field(default_factory=dict)
    """Trial -> number of lines that it has written."""
    writes: list[tuple[float, str]] = field(default_factory=list)
    """Time of each poll that saw new lines of a trial, and the trial."""

    def record_progress(self) -> None:
        """Record which trials have written new lines."""
        for directory in self.trials.glob("*"):
            count = len(read_steps_written(directory))
            if count > self.line_counts.get(directory.name, 0):
                self.line_counts[directory.name] = count
                self.writes.append((time.monotonic(), directory.name))

    def find_first_writes(self, moment: float) -> dict[str, float]:
        """Return each trial that wrote after `moment`, and the seconds until its first line."""
        first: dict[str, float] = {}
        for when, trial in self.writes:
            if when > moment + DYING_SECONDS:
                first.setdefault(trial, when - moment)
        return first

    def count_repeated_steps(self) -> int:
        lines = [read_steps_written(directory) for directory in self.trials.glob("*")]
        return sum(len(steps) - len(set(steps)) for steps in lines)


def write_files(directory: Path, url: str, steps: int, trials: int) -> Night:
    """Write the search space and the schedule file, as a user writes them."""
    (directory / "sweeps").mkdir(parents=True)
    space = NIGHT.replace("STEPS", str(steps)).replace("TRIALS", str(trials))
    (directory / "night.yaml").write_text(space)
    values = {
        "URL": url,
        "STORAGE": directory / "shared",
        "TRACKING": f"sqlite:///{directory}/mlflow.db",
    }
    sweep = SWEEP
    for word, value in values.items():
        sweep = sweep.replace(word, str(value))
    (directory / "sweeps" / "night.yaml").write_text(sweep)
    return Night(directory, (), fake=False)


@contextmanager
def run_schedule(night: Night) -> Iterator[subprocess.Popen[bytes]]:
    """Run the schedule command that submits the run and supervises it; kill it at the end."""
    command = [
        "-m",
        "gdpo_tune.schedule",
        "sweeps/",
        "run",
        "night",
        "--at",
        TICK,
        "--wait",
    ]
    environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with (night.directory / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--every", "2"],
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


def read_output(night: Night) -> str:
    """Return the output of the schedule command so far."""
    return (night.directory / "output.txt").read_text()


def wait(
    night: Night, process: subprocess.Popen[bytes], watch: Watch, moment: Callable[[], bool]
) -> None:
    """Wait until `moment` returns True; fail if the run ends first or takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not moment():
        watch.record_progress()
        ended = process.poll() is not None
        if (ended and not moment()) or time.monotonic() > deadline:
            raise SystemExit(f"timed out\n{read_output(night)}")
        time.sleep(0.2)


def list_running_trials(night: Night) -> list[int]:
    with Ledger.open(night.spec, read_only=True) as ledger:
        return [record.number for record in ledger.get_records() if record.state == "running"]


def list_incidents(night: Night) -> list[Any]:
    """Return the incidents of all sessions of the sweep, in order."""
    with Ledger.open(night.spec, read_only=True) as ledger:
        return [incident for session in ledger.get_sessions() for incident in session["incidents"]]


def find_lost_trials(night: Night) -> set[str]:
    return {
        str(trial)
        for incident in list_incidents(night)
        if "was lost" in incident.description or "was cut off" in incident.description
        for trial in incident.trials
    }


def compute_return_seconds(watch: Watch, moment: float, trials: Sequence[int]) -> dict[str, float]:
    """Return the seconds until the first and until the last of these trials wrote again."""
    back = [
        seconds
        for trial, seconds in watch.find_first_writes(moment).items()
        if int(trial) in trials
    ]
    return {
        "first_back_seconds": round(min(back), 1),
        "all_back_seconds": round(max(back), 1),
    }


def measure(steps: int = 60, trials: int = 14) -> dict[str, Any]:
    """Run both sweeps and compare them; exit status 1 if a limit is not met."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as name, make_short_directory() as short:
        directory = Path(name)
        for each in ("a", "b"):
            (short / each).mkdir()
        whole, undisturbed = run_sweep(
            directory / "whole", short / "a", steps, trials, disturbed=False
        )
        cut, disturbed = run_sweep(directory / "cut", short / "b", steps, trials, disturbed=True)
        differing = list_differences(collect_search_facts(cut), collect_search_facts(whole))
    back = max(disturbed[fault]["first_back_seconds"] for fault in ("node", "driver"))
    figures = {
        "slots": SLOTS,
        **disturbed,
        "undisturbed_wall_seconds": undisturbed["wall_seconds"],
        "same_trials": not differing,
        "differences": len(differing),
        "limit_back_seconds": LIMIT_SECONDS,
        "ok": not differing and not disturbed["processes_left"] and back <= LIMIT_SECONDS,
    }
    if not figures["ok"]:
        raise SystemExit(json.dumps(figures))
    return figures


if __name__ == "__main__":
    run(measure, {"steps": 30, "trials": 12})
