"""N LoRA trials of one policy: each in its own process, one after another in one, and as a pack.

    python benchmarks/pack.py [--small] [--sizes 2 4 8] [--engine vllm] [--policy DIRECTORY]

All sides train the same trials, which differ in learning rate, reward weights, normalization and
group size. Trials an hour count the time of whole processes: imports, loading, start of the engine,
training, held-out evaluation and checkpoints. The rewards cost nothing. Memory is the largest
resident memory of a process, and on a GPU what torch had reserved there, the engine included.

It runs on a GPU where there is one, else on a CPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_options import build_integer_type

SIDE = Path(__file__).with_name("pack_side.py")


@dataclass(frozen=True)
class Work:
    """What every trial does."""

    policy: str
    engine: str
    steps: int
    completions: int
    tokens: int
    rank: int
    threads: int


def main() -> None:
    """Measure every size and print the figures."""
    options = parse_options()
    work = Work(
        options.policy,
        options.engine,
        options.steps,
        options.completions,
        options.tokens,
        options.rank,
        options.threads,
    )
    print(" N  side         wall s   CPU s   memory MiB   GPU MiB")
    figures = [measure_size(work, size) for size in options.sizes]
    device = figures[0].pop("device")
    print(json.dumps({"benchmark": "pack", "device": device, **asdict(work), "sizes": figures}))


def parse_options() -> argparse.Namespace:
    """Read the command line; `--small` sets seconds of work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = build_integer_type(1)
    parser.add_argument("--small", action="store_true", help="two trials of two steps")
    parser.add_argument("--sizes", type=build_integer_type(2), nargs="+", default=[4])
    parser.add_argument("--policy", default="embedded", help="name or directory")
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--completions", type=count, default=64, help="of a step")
    parser.add_argument("--tokens", type=count, default=64, help="of the longest completion")
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--threads", type=count, default=1, help="of torch, on a CPU")
    options = parser.parse_args()
    if options.small:
        options.sizes, options.steps, options.completions, options.tokens = [2], 2, 16, 16
    return options


def measure_size(work: Work, size: int) -> dict[str, Any]:
    """Measure the three sides for N = `size` and compare their metrics."""
    numbers = range(size)
    apart = [run_side(work, "successive", [number]) for number in numbers]
    separate = {
        "wall_seconds": sum(one["wall_seconds"] for one in apart),
        "cpu_seconds": sum(one["cpu_seconds"] for one in apart),
        "memory_mib": max(one["memory_mib"] for one in apart),
        "gpu_mib": max(one["gpu_mib"] for one in apart),
        "metrics": [metrics for one in apart for metrics in one["metrics"]],
    }
    successive = run_side(work, "successive", list(numbers))
    together = run_side(work, "pack", list(numbers))
    sides = {"separate": separate, "successive": successive, "pack": together}
    for name, side in sides.items():
        shown = (side[key] for key in ("wall_seconds", "cpu_seconds", "memory_mib", "gpu_mib"))
        print(f"{size:2}  {name:10}", *(f"{value:10.1f}" for value in shown))
    kept = ("wall_seconds", "cpu_seconds", "memory_mib", "gpu_mib")
    return {
        "size": size,
        "device": apart[0]["device"],
        **{name: {key: round(side[key], 1) for key in kept} for name, side in sides.items()},
        "trials_an_hour": round(3600 * size / together["wall_seconds"], 1),
        "speedup_over_separate": round(separate["wall_seconds"] / together["wall_seconds"], 2),
        "speedup_over_successive": round(successive["wall_seconds"] / together["wall_seconds"], 2),
        "memory_of_one_trial": round(together["memory_mib"] / separate["memory_mib"], 2),
        "largest_difference": {
            name: compare(together["metrics"], sides[name]["metrics"])
            for name in ("separate", "successive")
        },
    }


def run_side(work: Work, side: str, numbers: list[int]) -> dict[str, Any]:
    """Run trials in a process of their own and return its figures.

    Raises:
        SystemExit: the process failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        plan = {"work": asdict(work), "side": side, "numbers": numbers, "directory": directory}
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(SIDE), json.dumps(plan)],
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{side} {numbers} ended with status {process.returncode}")
        return {
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "memory_mib": usage.ru_maxrss / 1024,
            **json.loads(Path(directory, "figures.json").read_text()),
        }


def compare(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Return the largest difference between the metrics of the same trials.

    Raises:
        SystemExit: the same trial has other metrics.
    """
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.keys() != other.keys():
            raise SystemExit(f"metrics differ: {sorted(one.keys() ^ other.keys())}")
        largest = max(largest, *(abs(value - other[name]) for name, value in one.items()))
    return largest


if __name__ == "__main__":
    main()
