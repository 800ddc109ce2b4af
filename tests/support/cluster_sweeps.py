"""Sweeps on clusters with faults, and a table of what the faults cost.

Training is the fake one at three steps a second, with a checkpoint at each, so that a sweep takes
seconds and its log lists each step with its trial, process and time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from gdpo_tune.ledger import Ledger
from tests.support.killed_sweeps import KilledSweep, wait_for_condition
from tests.support.paths import ROOT
from tests.support.ray_nodes import RayCluster, RayNode, read_command
from tests.support.sweep_properties import (
    check_every_trial_once,
    check_no_trial_goes_back,
    check_rungs_decide,
    collect_search_facts,
)
from tests.support.tuning import ENDS_ONLY

MARKS = [
    pytest.mark.fault,
    # Ray's clients leave sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""Marks of every test that disturbs a cluster."""
UndisturbedSweeps = dict[str, KilledSweep]
"""Sweeps without faults: `fifo` and `halving`."""
NODE = {"cpus": 2}
SLOTS = 4
"""Slots of two such nodes."""
STEPS = 20
SWEEP = (
    "search.sampler=random",
    *ENDS_ONLY,  # merges would come in the order in which trials end
    "search.replicates={per_point: 1, max_runs: 1}",
    f"training.steps={STEPS}",
    "resources={cpus: 1}",
)
FIFO = (*SWEEP, "search.trials=9", "search.scheduler={type: fifo}")
HALVING = (*SWEEP, f"search.budget.completions={64 * 7 * STEPS}")
TRIAL = "ray::ImplicitFunc"
"""Start of the command line of a trial's process."""
STANDSTILL_SECONDS = 1.0
"""Seconds without a step after which a trial counts as delayed; a step takes 0.3 s."""
MINUTE = 60.0
ROWS: list[tuple[str, ...]] = []
"""Rows of the table that is printed at the end of all tests."""
HEADER = ("fault", "duration", "affected", "restarts", "repeated steps", "first back", "all back")
PATHS = (str(ROOT), os.environ.get("PYTHONPATH", ""))
VARIABLES = {"PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
"""Environment of nodes whose trials import the fake training."""


@dataclass
class Fault:
    """Start and end of a fault."""

    began: float = 0.0
    """Unix time in seconds."""
    ended: float = 0.0


@contextmanager
def time_fault() -> Iterator[Fault]:
    """Record the start and end of the block as those of a fault."""
    fault = Fault(began=time.time())
    yield fault
    fault.ended = time.time()


def wait_during_fault(seconds: float, process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def build_slow_sweep(
    directory: Path, overrides: tuple[str, ...], cluster: RayCluster
) -> KilledSweep:
    sweep = KilledSweep(directory, overrides, fake=True, address=cluster.address)
    sweep.slow_down()
    return sweep


@contextmanager
def run_until_under_way(
    sweep: KilledSweep, node: RayNode | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sweep and yield its process once enough trials run to disturb it."""
    with sweep.start() as process:
        wait_for_condition(process, lambda: is_well_under_way(sweep, node), sweep.read_errors)
        yield process


def is_well_under_way(sweep: KilledSweep, node: RayNode | None = None) -> bool:
    """Return whether at least two trials run, one of them on the node.

    On a busy machine no more trials may run before the first ones end.
    """
    return len(find_training_processes(sweep)) >= 2 and bool(find_training_processes(sweep, node))


def find_training_processes(
    sweep: KilledSweep, node: RayNode | None = None
) -> list[psutil.Process]:
    """Find processes of trials between step 2 and step `STEPS - 5`, on one node or on all."""
    starts, newest = dict[str, dict[str, Any]](), dict[int, dict[str, Any]]()
    for entry in sweep.read_log():
        start = starts[entry["trial"]] = entry if "from" in entry else starts[entry["trial"]]
        newest[start["pid"]] = {**start, **entry}
    pids = [
        pid
        for pid, entry in newest.items()
        if 2 <= entry.get("checkpoint", 0) <= STEPS - 5
        and time.time() - entry["time"] < STANDSTILL_SECONDS
        and (node is None or entry["node"] == node.id)
    ]
    found: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # its trial waits at a rung, or has just ended
            found.append(psutil.Process(pid))
    return found


def find_trial_processes(*nodes: RayNode) -> list[psutil.Process]:
    return [p for node in nodes for p in node.list_processes() if read_command(p).startswith(TRIAL)]


def add_row(name: str, sweep: KilledSweep, fault: Fault) -> int:
    """Add a row with the cost of a fault to the table; return the number of delayed trials."""
    log = sweep.read_log()
    hit, begun, again = dict[str, float](), 0, 0
    for trial in {entry["trial"] for entry in log}:
        entries = [entry for entry in log if entry["trial"] == trial]
        still = [
            after["time"] - fault.began
            for before, after in pairwise(entries)
            if before["time"] < fault.ended + STANDSTILL_SECONDS
            and after["time"] - max(before["time"], fault.began) > STANDSTILL_SECONDS
        ]
        if still:
            hit[trial] = max(still)
        begun += sum("from" in entry for entry in entries[1:])
        steps = [entry["checkpoint"] for entry in entries if "checkpoint" in entry]
        again += len(steps) - len(set(steps))
    lasted = fault.ended - fault.began
    ROWS.append(
        (
            name,
            f"{lasted:.0f} s" if lasted > STANDSTILL_SECONDS else "",
            *(str(len(hit)), str(begun), str(again)),
            *(f"{each(hit.values()):.1f} s" if hit else "" for each in (min, max)),
        )
    )
    return len(hit)


def format_table() -> str:
    """Format all rows in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *ROWS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_recovery(cluster: RayCluster, cut: KilledSweep, whole: KilledSweep) -> None:
    """Check a disturbed sweep against an undisturbed one."""
    check_every_trial_once(cut)
    check_no_trial_goes_back(cut)
    check_same_trials(cut, whole)
    check_no_process_is_left(cluster)


def check_same_trials(cut: KilledSweep, whole: KilledSweep) -> None:
    """Check that two sweeps have the same trials.

    With `fifo` all facts are equal. With rungs, which trials stop depends on the order of their
    arrival; everything else is equal.
    """
    facts, expected = collect_search_facts(cut), collect_search_facts(whole)
    if "fifo" in cut.overrides[-1]:
        assert facts == expected
        return
    check_rungs_decide(cut)
    for one, other in zip(facts, expected, strict=True):
        for key in ("number", "role", "params", "seed"):
            assert one[key] == other[key]
        both = min(len(one["rungs"]), len(other["rungs"]))
        assert one["rungs"][:both] == other["rungs"][:both]


def check_no_process_is_left(cluster: RayCluster) -> None:
    deadline = time.monotonic() + 30
    while find_trial_processes(*cluster.nodes) and time.monotonic() < deadline:
        time.sleep(0.2)
    below = [process for node in cluster.nodes for process in node.list_processes()]
    assert find_trial_processes(*cluster.nodes) == []
    assert [p for p in below if p.is_running() and p.status() == psutil.STATUS_ZOMBIE] == []


def list_incidents(sweep: KilledSweep) -> list[str]:
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return [
            str(incident) for session in ledger.get_sessions() for incident in session["incidents"]
        ]
