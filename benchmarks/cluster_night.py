"""A scheduled sweep on a cluster that loses a node and then the driver, beside an undisturbed one.

    python benchmarks/cluster_night.py [--small]

The cluster is two `ray start` nodes on this machine, with two logical GPUs each. The benchmark runs
`python -m gdpo_tune.schedule sweeps/ run NAME --wait`, which submits through the Jobs API. Trials
train the embedded policy and take half a GPU, so eight of them fill the cluster. The first sweep is
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

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from night import (
    PATIENCE,
    Night,
    Watch,
    compute_return_seconds,
    find_lost_trials,
    list_incidents,
    list_running_trials,
    read_output,
    run_schedule,
    wait,
    write_files,
)

from gdpo_tune.training.checkpoints import find_newest_checkpoint
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

NODE = {"cpus": 4, "gpus": 2}
SLOTS, ON_A_NODE = 8, 4
TRIAL = "ray::ImplicitFunc"
"""Name of the process of a trial."""
LIMIT_SECONDS = 120.0
"""Most seconds until a lost trial is back."""


def list_trial_processes(node: RayNode) -> list[psutil.Process]:
    """Return the processes of trials on a node."""
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


def run(
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


def main() -> None:
    """Run both sweeps and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="shorter trials, and fewer: minutes")
    options = parser.parse_args()
    size = {"steps": 30, "trials": 12} if options.small else {"steps": 60, "trials": 14}
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as name, make_short_directory() as short:
        directory = Path(name)
        for each in ("a", "b"):
            (short / each).mkdir()
        whole, undisturbed = run(directory / "whole", short / "a", **size, disturbed=False)
        cut, disturbed = run(directory / "cut", short / "b", **size, disturbed=True)
        same = not (
            differing := list_differences(collect_search_facts(cut), collect_search_facts(whole))
        )
    back = max(disturbed[fault]["first_back_seconds"] for fault in ("node", "driver"))
    clean = not disturbed["processes_left"]
    figures = {
        "benchmark": "cluster_night",
        "slots": SLOTS,
        **disturbed,
        "undisturbed_wall_seconds": undisturbed["wall_seconds"],
        "same_trials": same,
        "differences": len(differing),
        "limit_back_seconds": LIMIT_SECONDS,
        "ok": same and clean and back <= LIMIT_SECONDS,
    }
    print(json.dumps(figures))
    sys.exit(not figures["ok"])


if __name__ == "__main__":
    main()
