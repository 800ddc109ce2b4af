"""Candidates per second in the sandbox, against one `python -c` at a time.

    python benchmarks/sandbox.py [--rounds 9] [--small]

A candidate is one trivial function with five asserts; one in 20 is wrong. The sides, with one and
with two candidates side by side: `python_c` in an empty environment, the unit of the ratios;
`unsafe`, `UnsafeNoIsolationSandbox`; and `locked`, `CodeSandbox`. `hardening` is
1 - locked / unsafe: the cost of the lockdown alone.

Blocks of all sides alternate, so that a noisy machine affects all. Figures are medians over the
rounds; ratios are computed within a round first. A second set of blocks has 5 % infinite loops,
each of which ends at .5 s: of a wall clock for `python -c`, of a CPU clock for ours. Every verdict
is checked. A correct candidate that a clock stops on a busy machine counts as `late`. The last line
is JSON. Limits are reported, never enforced.
"""

from __future__ import annotations

import os
import platform
import select
import statistics
import subprocess
import tempfile
import time
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness import list_processes, print_table, run

from gdpo_tune.sandbox import CodeSandbox, Job, Limits
from gdpo_tune.sandbox.local_sandbox import UnsafeNoIsolationSandbox

LIMITS = Limits(cpu_seconds=0.5)
LEAST_RATIO = {1: 3.5, 2: 7.0}
"""Workers -> least ratio to `python -c`."""
MOST_HARDENING = 0.25
PERIOD = 20
"""One candidate in `PERIOD` is wrong; in blocks with loops, another one never ends."""
GROUP = 8
"""Number of candidates that share their tests, as the completions of one prompt do."""


class PythonC:
    """`python -c program`: a new interpreter for each candidate.

    It runs from an empty virtual environment, because `.pth` files of installed packages slow
    every start of an interpreter.
    """

    info = None

    def __init__(self, workers: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        venv.create(self._directory.name, symlinks=True)
        self._threads = ThreadPoolExecutor(workers)

    def run(self, jobs: list[Job]) -> list[str]:
        return list(self._threads.map(self._run_one, jobs))

    def _run_one(self, job: Job) -> str:
        null, python = subprocess.DEVNULL, Path(self._directory.name, "bin", "python")
        command = [python, "-c", "\n".join([job.code, *job.asserts])]
        with subprocess.Popen(command, stdin=null, stdout=null, stderr=null) as process:
            # NOTE: `subprocess` polls in steps of up to 50 ms, which would cost this side a third
            # of its speed.
            handle = os.pidfd_open(process.pid)
            ended, _, _ = select.select([handle], [], [], LIMITS.cpu_seconds)
            os.close(handle)
            if not ended:
                process.kill()
                return "timeout"
            return "failed" if process.wait() else "passed"

    def close(self) -> None:
        self._threads.shutdown()
        self._directory.cleanup()


class Boxed:
    """One of our sandboxes."""

    def __init__(self, kind: type[Any], workers: int) -> None:
        self._sandbox = kind(workers)
        self.info = self._sandbox.info
        self.close = self._sandbox.close

    def run(self, jobs: list[Job]) -> list[str]:
        return [result.status for result in self._sandbox.run_batch(jobs)]


SIDES: dict[str, tuple[Callable[[int], Any], int]] = {
    "python_c": (PythonC, 40),
    "unsafe": (partial(Boxed, UnsafeNoIsolationSandbox), 400),
    "locked": (partial(Boxed, CodeSandbox), 400),
}
"""Name -> factory of the side, and candidates for each block and worker."""


@dataclass
class Row:
    """Measurements of one side with some workers, one entry for each round."""

    side: Any
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    with_loops: list[float] = field(default_factory=list)
    late: int = 0


def build_candidates(count: int, first: int, *, loops: bool) -> list[tuple[Job, str]]:
    """Build new candidates with their verdicts; tests differ between groups and between blocks."""
    candidates: list[tuple[Job, str]] = []
    for index in range(count):
        factor = first + index // GROUP
        tests = tuple(f"assert f({x}) == {x * factor + 1}" for x in range(5))
        code, expected = f"def f(x):\n    return x * {factor} + 1\n", "passed"
        if index % PERIOD == 3:
            code, expected = f"def f(x):\n    return x * {factor} + 2\n", "failed"
        elif loops and index % PERIOD == 10:
            code, expected = "def f(x):\n    while True:\n        pass\n", "timeout"
        candidates.append((Job(code, asserts=tests, limits=LIMITS), expected))
    return candidates


def run_block(row: Row, count: int, first: int, *, loops: bool) -> None:
    """Run one block, check its verdicts and record its figures."""
    batch = build_candidates(count, first, loops=loops)
    cpu, wall = measure_cpu_seconds(), time.perf_counter()
    verdicts = row.side.run([job for job, _ in batch])
    wall, cpu = time.perf_counter() - wall, measure_cpu_seconds() - cpu
    for (job, expected), verdict in zip(batch, verdicts, strict=True):
        if verdict == "timeout" != expected:
            row.late += 1
        elif verdict != expected:
            raise SystemExit(f"{row.side}: {verdict} where {expected} is right:\n{job}")
    (row.with_loops if loops else row.rates).append(count / wall)
    if not loops:
        row.cpu_ms.append(1000 * cpu / count)


def measure_cpu_seconds() -> float:
    """Return the CPU time of this process and all of its descendants, ended ones included."""
    total = 0.0
    for process in list_processes():
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def compare(row: Row, other: Row) -> float:
    """Compute the median over the rounds of the ratio of two sides' rates."""
    return statistics.median(a / b for a, b in zip(row.rates, other.rates, strict=True))


def measure(rounds: int = 9, rounds_with_loops: int = 5, share: float = 1.0) -> dict[str, Any]:
    """Run the sides in turns; `share` is that of the usual candidates of a block."""
    with ExitStack() as stack:
        table = {
            (name, workers): Row(stack.enter_context(closing(make(workers))))
            for name, (make, _) in SIDES.items()
            for workers in LEAST_RATIO
        }
        for (_, workers), row in table.items():
            row.side.run([job for job, _ in build_candidates(GROUP * workers, 0, loops=False)])
        for turn in range(rounds):
            for (name, workers), row in list(table.items())[:: 1 if turn % 2 else -1]:
                first, size = 1000 * (turn + 1), round(share * SIDES[name][1])
                run_block(row, size * workers, first, loops=False)
                if turn < rounds_with_loops:
                    run_block(row, PERIOD * workers, first, loops=True)
    unit = table["python_c", 1]
    sides = {
        f"{name}_{workers}": {
            "per_second": round(statistics.median(row.rates), 1),
            "low": round(min(row.rates), 1),
            "high": round(max(row.rates), 1),
            "of_unit": round(compare(row, unit), 2),
            "cpu_ms": round(statistics.median(row.cpu_ms), 2),
            "per_second_with_loops": round(statistics.median(row.with_loops), 1),
            "late": row.late,
        }
        for (name, workers), row in table.items()
    }
    print_table(("", *sides["locked_1"]), *((name, *side.values()) for name, side in sides.items()))
    ratio = {n: round(compare(table["locked", n], unit), 3) for n in LEAST_RATIO}
    hardening = {
        n: round(1 - compare(table["locked", n], table["unsafe", n]), 3) for n in LEAST_RATIO
    }
    info = table["locked", 1].side.info
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return {
        **machine,
        "cores": len(os.sched_getaffinity(0)),
        "tier": info.tier,
        "layers": info.layers,
        "rounds": rounds,
        "sides": sides,
        "ratio": ratio,
        "least_ratio": LEAST_RATIO,
        "ratio_ok": all(ratio[n] >= least for n, least in LEAST_RATIO.items()),
        "hardening": hardening,
        "hardening_ok": max(hardening.values()) <= MOST_HARDENING,
    }


if __name__ == "__main__":
    run(measure, {"rounds": 2, "rounds_with_loops": 1, "share": 0.25})
