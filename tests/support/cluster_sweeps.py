"""Sweeps on clusters that something goes wrong with, and what that cost them.

Training is the fake one at three steps a second, with a checkpoint at each, so that a sweep takes
seconds and its log says who did what when.
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
from tests.support.killed_sweeps import KilledSweep, wait_until
from tests.support.paths import ROOT
from tests.support.ray_nodes import RayCluster, RayNode, read_command
from tests.support.sweep_properties import (
    check_every_trial_once,
    check_no_trial_goes_back,
    check_rungs_decide,
    collect_search_facts,
)

MARKS = [
    pytest.mark.fault,
    # Ray's clients leave sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""Of every test that disturbs a cluster on which such a sweep runs."""
Whole = dict[str, KilledSweep]
"""Sweeps that nothing has disturbed: `fifo` and `asha`."""
NODE = {"cpus": 2}
SLOTS = 4
"""Of two such nodes."""
STEPS = 20
SWEEP = (
    "search.sampler=random",
    "search.trials=9",
    "search.replicates={per_point: 1, max_runs: 1}",
    f"training.steps={STEPS}",
    "resources={cpus: 1}",
)
FIFO = (*SWEEP, "search.scheduler={type: fifo}")
ASHA = (*SWEEP, "search.scheduler={type: asha, grace: 0.1, variant: stop}")
TRIAL = "ray::ImplicitFunc"
"""What the process of a trial calls itself."""
STOOD_STILL = 1.0
"""Seconds without a step, which takes a third of one, after which a trial was disturbed."""
MINUTE = 60.0
ROWS: list[tuple[str, ...]] = []
"""Of the table that is printed at the end of all tests."""
HEADER = ("fault", "lasted", "trials hit", "begun again", "steps again", "first back", "all back")
PATHS = (str(ROOT), os.environ.get("PYTHONPATH", ""))
VARIABLES = {"PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
"""For nodes whose trials import the fake training."""


@dataclass
class Fault:
    """When something was wrong."""

    began: float = 0.0
    """Unix time in seconds."""
    ended: float = 0.0


@contextmanager
def time_fault() -> Iterator[Fault]:
    """What happens in this block goes wrong."""
    known = Fault(began=time.time())
    yield known
    known.ended = time.time()


def let_last(seconds: float, process: subprocess.Popen[bytes]) -> None:
    """Let a fault last, unless the sweep does without what is wrong and ends before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def build_slow_sweep(folder: Path, given: tuple[str, ...], cluster: RayCluster) -> KilledSweep:
    """Not started yet."""
    sweep = KilledSweep(folder, given, fake=True, address=cluster.address)
    sweep.slow_down()
    return sweep


@contextmanager
def run_until_under_way(
    sweep: KilledSweep, node: RayNode | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep that runs, once it is worth disturbing."""
    with sweep.running() as process:
        wait_until(process, lambda: is_well_under_way(sweep, node), sweep.read_errors)
        yield process


def is_well_under_way(sweep: KilledSweep, node: RayNode | None = None) -> bool:
    """Whether two trials at least run side by side, one of them on a node. On a busy machine no
    more may be up before the first ones end."""
    return len(find_training_processes(sweep)) >= 2 and bool(find_training_processes(sweep, node))


def find_training_processes(
    sweep: KilledSweep, node: RayNode | None = None
) -> list[psutil.Process]:
    """Processes that train a trial, beyond a checkpoint and with a way to go, on a node or all."""
    starts, newest = dict[str, dict[str, Any]](), dict[int, dict[str, Any]]()
    for entry in sweep.read_log():
        start = starts[entry["trial"]] = entry if "from" in entry else starts[entry["trial"]]
        newest[start["pid"]] = {**start, **entry}
    return [
        psutil.Process(pid)
        for pid, entry in newest.items()
        if 2 <= entry.get("checkpoint", 0) <= STEPS - 5
        and time.time() - entry["time"] < STOOD_STILL
        and (node is None or entry["node"] == node.id)
    ]


def find_trial_processes(*nodes: RayNode) -> list[psutil.Process]:
    """Processes of trials that run there."""
    return [p for node in nodes for p in node.processes() if read_command(p).startswith(TRIAL)]


def add_row(name: str, sweep: KilledSweep, known: Fault) -> int:
    """Put what a fault has cost into the table; return how many trials have felt it."""
    log = sweep.read_log()
    hit, begun, again = dict[str, float](), 0, 0
    for trial in {entry["trial"] for entry in log}:
        entries = [entry for entry in log if entry["trial"] == trial]
        still = [
            after["time"] - known.began
            for before, after in pairwise(entries)
            if before["time"] < known.ended + STOOD_STILL
            and after["time"] - max(before["time"], known.began) > STOOD_STILL
        ]
        if still:
            hit[trial] = max(still)
        begun += sum("from" in entry for entry in entries[1:])
        steps = [entry["checkpoint"] for entry in entries if "checkpoint" in entry]
        again += len(steps) - len(set(steps))
    lasted = known.ended - known.began
    ROWS.append(
        (
            name,
            f"{lasted:.0f} s" if lasted > STOOD_STILL else "",
            *(str(len(hit)), str(begun), str(again)),
            *(f"{each(hit.values()):.1f} s" if hit else "" for each in (min, max)),
        )
    )
    return len(hit)


def format_table() -> str:
    """All rows so far, in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *ROWS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_recovery(cluster: RayCluster, cut: KilledSweep, whole: KilledSweep) -> None:
    """All that holds of a sweep that was disturbed, beside one that was not."""
    check_every_trial_once(cut)
    check_no_trial_goes_back(cut)
    check_same_trials(cut, whole)
    check_nothing_is_left(cluster)


def check_same_trials(cut: KilledSweep, whole: KilledSweep) -> None:
    """First in, first out: all is equal. With rungs: who is stopped hangs on who came first, and
    everything else is equal."""
    found, expected = collect_search_facts(cut), collect_search_facts(whole)
    if "fifo" in cut.overrides[-1]:
        assert found == expected
        return
    check_rungs_decide(cut)
    for one, other in zip(found, expected, strict=True):
        for key in ("number", "role", "params", "seed"):
            assert one[key] == other[key]
        both = min(len(one["rungs"]), len(other["rungs"]))
        assert one["rungs"][:both] == other["rungs"][:both]


def check_nothing_is_left(cluster: RayCluster) -> None:
    """No trial runs on after the end of the sweep, and no process waits to be buried."""
    deadline = time.monotonic() + 30
    while find_trial_processes(*cluster.nodes) and time.monotonic() < deadline:
        time.sleep(0.2)
    below = [process for node in cluster.nodes for process in node.processes()]
    assert find_trial_processes(*cluster.nodes) == []
    assert [p for p in below if p.is_running() and p.status() == psutil.STATUS_ZOMBIE] == []


def list_incidents(sweep: KilledSweep) -> list[str]:
    """What befell the sweep, as the ledger has it."""
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return [str(what) for session in ledger.get_sessions() for what in session["incidents"]]
