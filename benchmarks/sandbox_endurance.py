"""Growth of processes, descriptors and memory over many jobs in one sandbox.

    python benchmarks/sandbox_endurance.py [--jobs 100000] [--small]

The jobs are a mix of every ending, and every status is checked. Between batches the benchmark reads
processes, zombies, descriptors and memory of the trainer and of the sandbox. Growth is the slope of
a straight line through the samples after the first fifth, in MiB per 10,000 jobs. `leaks` names
counts that are higher at the end than after the first batch, and memory that grows by more than the
limit: in a short run, whose slope is mostly noise, a MiB. The last line is JSON.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
from harness import list_processes, print_table, run

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, Sandbox, Stream

WORKERS = 2
MIB = 2**20
MOST_GROWTH = 0.5
"""MiB per 10,000 jobs."""
NOISE_MIB = 1.0
"""MiB of growth that count as noise of the allocators, even after few jobs."""
SHORT = Limits(cpu_seconds=0.01)
TIGHT = Limits(memory_bytes=96 << 20)
STREAMS = tuple(Stream(f"{x}\n", f"{x + 1}\n") for x in range(5))
CALLS = tuple(Call("f", (x,), x + 1) for x in range(5))


def build_mix() -> list[tuple[Job, str]]:
    """Build fifty jobs with the status that each must have."""
    good = "def f(x):\n    return x + 1\n"
    value = "def f(x):\n    return list(range(x * 1000))\n"
    every_50 = [
        (Job("while True: pass", CALLS, limits=SHORT), "timeout"),
        (Job("def f(x):\n    while True: pass", asserts=("assert f(1)",), limits=SHORT), "timeout"),
        (Job("def f(x):\n    return bytes(1 << 30)", CALLS, limits=TIGHT), "memory"),
        (Job("import os\nos._exit(0)", CALLS), "crash"),
        (Job("def f(x):\n    raise SystemExit(0)", CALLS), "error"),
        (Job("import subprocess", CALLS), "error"),
        (Job("print('x' * 2_000_000)", CALLS), "output"),
        (Job("def f(x):\n    return 'x' * 2_000_000", CALLS), "output"),
        (Job("import os\ndef f(x):\n    os.fork()", CALLS), "violation"),
        (Job("import os\ndef f(x):\n    os.write(3, b'forged frame')", CALLS), "output"),
        (Job("def f(x)\n    return", CALLS), "error"),
        (Job("print(int(input()) + 1)", streams=STREAMS), "passed"),
        (Job("print(int(input()) + 2)", streams=STREAMS), "failed"),
        (Job("while True: print('x' * 9999)", streams=STREAMS), "output"),
        (Job("while True: pass", streams=STREAMS, limits=SHORT), "timeout"),
        (Job(value, (Call("f", (5,), list(range(5000))),)), "passed"),
    ]  # fmt: skip
    tests = ("assert f(1) > 1", "assert isinstance(f(3), int)", "assert f(0) == 1")
    usual = [
        (Job(good, CALLS), "passed"),
        (Job(good, asserts=tests), "passed"),
        (Job("def f(x):\n    return x + 2", CALLS), "failed"),
        (Job("def f(x):\n    return x / 0", CALLS), "error"),
        (Job(good, CALLS), "passed"),
    ]
    rest = 50 - len(every_50)
    return every_50 + [usual[index % len(usual)] for index in range(rest)]


Sample = dict[str, float | None]


def take_sample(jobs: int) -> Sample:
    """Read the state of this process and all of its descendants; memory in MiB.

    `boxes_rss` is that of zygotes together, in which shared pages count once for each process.
    `descriptors` is None, and `pss` 0, where some of them may not be read.
    """
    processes = list_processes()
    living = [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
    sizes = [process.memory_info().rss / MIB for process in living]
    return {
        "jobs": jobs,
        "processes": len(living),
        "zombies": len(processes) - len(living),
        "descriptors": sum_where_allowed(living, lambda process: process.num_fds()),
        "trainer_rss": round(sizes[0], 2),
        "boxes_rss": round(sum(sizes[1:]), 2),
        "pss": round(sum_where_allowed(living, lambda p: p.memory_full_info().pss / MIB) or 0.0, 2),
    }


def sum_where_allowed(processes: list[Any], read: Callable[[Any], float]) -> float | None:
    """Return the sum of a figure of all processes; None if one of them may not be read."""
    try:
        return sum(map(read, processes))
    except psutil.AccessDenied:
        return None


def endure(sandbox: Sandbox, jobs: int, every: int) -> tuple[list[Sample], Counter[str]]:
    """Run the mix repeatedly; take a sample after the first batch and then after `every` jobs.

    Raises:
        SystemExit: a job has a wrong status.
    """
    batch = build_mix()
    samples: list[Sample] = []
    counts: Counter[str] = Counter()
    done = 0
    while done < jobs:
        results = sandbox.run_batch([job for job, _ in batch])
        for (job, expected), result in zip(batch, results, strict=True):
            if result.status != expected:
                raise SystemExit(f"after {done} jobs: {result} where {expected} is right: {job}")
            counts[result.status] += 1
        done += len(batch)
        if len(samples) < 1 + done // every:
            samples.append(take_sample(done))
    return samples, counts


def fit_slope(samples: list[Sample], name: str) -> float:
    """Compute the growth per 10,000 jobs after the first fifth."""
    settled = [one for one in samples if one["jobs"] >= samples[-1]["jobs"] / 5]
    columns = ([one[key] for one in settled] for key in ("jobs", name))
    return 10_000 * statistics.linear_regression(*columns)[0]


def find_leaks(samples: list[Sample], growth: dict[str, float]) -> list[str]:
    """Return the names of the quantities that grew by more than their limit."""
    first, last = samples[0], samples[-1]
    counts = ("processes", "zombies", "descriptors")
    more = [name for name in counts if (last[name] or 0) > (first[name] or 0)]
    allowed = max(MOST_GROWTH, NOISE_MIB * 10_000 / last["jobs"])
    return more + [name for name, value in growth.items() if value > allowed]


def measure(jobs: int = 100_000) -> dict[str, object]:
    """Run the jobs and print samples and figures."""
    started = time.perf_counter()
    with CodeSandbox(WORKERS) as sandbox:
        samples, counts = endure(sandbox, jobs, every=min(5000, max(50, jobs // 20)))
        tier = sandbox.info.tier
    seconds = time.perf_counter() - started
    first, last = samples[0], samples[-1]
    print_table(tuple(first), *(tuple(one.values()) for one in samples))
    growth = {name: fit_slope(samples, name) for name in ("trainer_rss", "boxes_rss", "pss")}
    return {
        "jobs": last["jobs"],
        "workers": WORKERS,
        "tier": tier,
        "statuses": dict(counts.most_common()),
        "seconds": round(seconds, 1),
        "jobs_per_second": round(last["jobs"] / seconds, 1),
        "first": first,
        "last": last,
        "growth_mib_per_10000_jobs": {name: round(value, 3) for name, value in growth.items()},
        "most_growth": MOST_GROWTH,
        "leaks": find_leaks(samples, growth),
    }


if __name__ == "__main__":
    run(measure, {"jobs": 1000})
