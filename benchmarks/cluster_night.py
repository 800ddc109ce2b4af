"""A scheduled sweep on a cluster that loses a node and then the driver, beside one undisturbed.

    python benchmarks/cluster_night.py [--small]

Two `ray start` nodes of this machine with two logical GPUs each. A file of the kind in `sweeps/`,
`python -m gdpo_tune.schedule sweeps/ run NAME --wait`, the Jobs API, the shipped training with the
embedded policy, and trials of half a GPU, so that eight of them take all four. First the sweep is
left alone. Then the same again: once all slots are taken and half of the trials have a checkpoint,
the node that is not the head gets `kill -9` as a whole; once one of its trials trains again, the
driver does. The schedule then submits its second attempt.

A trial was lost at the last step that it had written; it is back at work when it writes the next
line, which for the last ones of the node is after the loss of the driver. Steps that were done
again are those behind its newest checkpoint.

The last line is JSON: for both faults what was lost and the seconds until back at work, the wall
times of both sweeps, and whether each trial of the search came to what it did undisturbed. Which
configurations get replicates is decided by who ends first, so those may differ.
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
    back_seconds,
    incidents,
    lost_trials,
    running,
    scheduled,
    told,
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
"""What the process of a trial calls itself."""
LIMIT_SECONDS = 120.0
"""Until back at work."""


def trials_on(node: RayNode) -> list[psutil.Process]:
    """Processes of trials that run there."""
    return [process for process in node.list_processes() if read_command(process).startswith(TRIAL)]


def driver_on(node: RayNode) -> psutil.Process:
    """The driver of the sweep, which is the job itself and not the shell that started it."""
    (driver,) = [
        process
        for process in node.list_processes()
        if "-m gdpo_tune.sweep night.yaml" in read_command(process) and "sh" not in process.name()
    ]
    return driver


def well_under_way(night: Night, cluster: RayCluster) -> bool:
    """Whether all slots are taken, and half of the trials have a checkpoint."""
    if any(len(trials_on(node)) < ON_A_NODE for node in cluster.nodes):
        return False
    numbers = running(night)
    folders = [night.spec.directory / "trials" / str(number) for number in numbers]
    have = sum(find_newest_checkpoint(folder) is not None for folder in folders)
    return len(numbers) == SLOTS and have >= SLOTS // 2


def disturb(
    night: Night, process: subprocess.Popen[bytes], cluster: RayCluster, watch: Watch
) -> dict[str, Any]:
    """Kill the node and then the driver; return what was lost, and for how long."""
    head, other = cluster.nodes
    wait(night, process, watch, lambda: well_under_way(night, cluster))
    watch.look()
    other.kill()
    cluster.nodes.remove(other)
    killed = time.monotonic()
    watch.look()

    # with half of the slots gone, the others wait until those that run have ended
    wait(night, process, watch, lambda: bool(lost_trials(night) & watch.after(killed).keys()))
    lost, again = sorted(map(int, lost_trials(night))), watch.repeated()
    under_way = running(night)
    driver_on(head).kill()
    driver_killed = time.monotonic()
    wait(night, process, watch, lambda: process.poll() is not None)
    node = {"trials": lost, "steps_again": again, **back_seconds(watch, killed, lost)}
    driver = {"trials": under_way, "steps_again": watch.repeated() - again}
    driver |= back_seconds(watch, driver_killed, under_way)
    return {"node": node, "driver": driver}


def differences(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """In what trials of two runs differ, one line each."""
    found = [
        f"trial {one['number']}: {key} = {one[key]}, not {other[key]}"
        for one, other in zip(some, others, strict=False)
        for key in one
        if one[key] != other[key]
    ]
    print(*found, sep="\n")
    return found + [f"{len(some)} trials, not {len(others)}"] * (len(some) != len(others))


def run(
    folder: Path, ray: Path, steps: int, trials: int, *, disturbed: bool
) -> tuple[Night, dict[str, Any]]:
    """A run from its start to its end, on a cluster of its own."""
    found: dict[str, Any] = {}
    with open_ray_cluster(ray) as cluster:
        head = cluster.start_head(dashboard=True, **NODE)
        cluster.add_node(**NODE)
        night = write_files(folder, cluster.url, steps, trials)
        watch = Watch(night.spec.directory / "trials")
        began = time.monotonic()
        with scheduled(night) as process:
            if disturbed:
                found = disturb(night, process, cluster, watch)
            status = process.wait(PATIENCE)
        if status:
            raise SystemExit(f"the run ended with {status}\n{told(night)}")
        found["wall_seconds"] = round(time.monotonic() - began, 1)
        left = [*trials_on(head), *(p for p in head.list_processes() if p.status() == "zombie")]
        found["processes_left"] = len(left)
    check_every_trial_once(night)
    check_no_trial_goes_back(night)
    found["trials"] = len(list(watch.trials.iterdir()))
    found["steps_again"] = watch.repeated()
    print(told(night), *(str(incident) for incident in incidents(night)), sep="\n")
    return night, found


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="shorter trials, and fewer: minutes")
    options = parser.parse_args()
    size = {"steps": 30, "trials": 12} if options.small else {"steps": 60, "trials": 14}
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as name, make_short_directory() as short:
        folder = Path(name)
        for each in ("a", "b"):
            (short / each).mkdir()
        whole, undisturbed = run(folder / "whole", short / "a", **size, disturbed=False)
        cut, found = run(folder / "cut", short / "b", **size, disturbed=True)
        same = not (
            differing := differences(collect_search_facts(cut), collect_search_facts(whole))
        )
    back = max(found["node"]["first_back_seconds"], found["driver"]["first_back_seconds"])
    clean = not found["processes_left"]
    figures = {
        "benchmark": "cluster_night",
        "slots": SLOTS,
        **found,
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
