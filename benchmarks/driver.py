"""What the search itself costs: a sweep of instant trials, everything around training left in.

    python benchmarks/driver.py [--small]

Two sweeps of one size run through `run_sweep`, Ray and the ledger included, with a `train()` that
returns at once: one with a single result a trial, one with many. The random sampler is used, so the
figures are the cost of the machinery and not of a model. CPU time is that of the driver's process
(all of its threads), from the call of `run_sweep` to its return, the start of Ray included.

The last line is JSON: CPU milliseconds a trial and a further result, peak resident MiB, limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.events import Event, TrialProgress, TrialStarted
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.trials import Cost, Estimate, Measurement, Outcome, Report, TrialConfig

LIMIT_MS = 25.0
"""CPU a trial that the driver may cost."""
MANY = 20
"""Results a trial in the second sweep."""
SPACE = Path(__file__).resolve().parents[1] / "search_spaces" / "code.yaml"


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """An instant trial: as many results as it has steps, then an outcome."""
    del resume
    weight = float(config.params["reward_weights.format"])
    cost = Cost(completions=1)
    for step in range(1, config.training.steps + 1):
        report(Measurement(step, {"train/loss": 1 / step}, cost), None)
    values = {"correctness": 1 / (1 + weight), "format": weight / (1 + weight), "length": 0.5}
    estimates = {name: Estimate(value, 0.01) for name, value in values.items()}
    return Outcome(estimates, estimates, cost, None)


@dataclass(frozen=True)
class Run:
    """One sweep, measured."""

    trials: int
    results: int
    cpu: float
    wall: float
    start: float
    """CPU seconds until the first trial: imports and Ray."""


def measure(spec: SweepSpec) -> Run:
    """Run a sweep and count what it cost this process."""
    from gdpo_tune.tuning import run_sweep

    results = 0
    start = 0.0

    def count(event: Event) -> None:
        nonlocal results, start
        results += isinstance(event, TrialProgress)
        if not start and isinstance(event, TrialStarted):
            start = time.process_time() - cpu_before

    wall, cpu_before = time.perf_counter(), time.process_time()
    done = run_sweep(spec, listeners=[count], train="driver:train")
    cpu, wall = time.process_time() - cpu_before, time.perf_counter() - wall
    complete = sum(record.state == "complete" for record in done.records)
    if complete != len(done.records):
        raise SystemExit(f"{len(done.records) - complete} trials failed: the figures mean nothing")
    return Run(complete, results, cpu, wall, start)


def sweep(folder: str, name: str, trials: int, steps: int) -> SweepSpec:
    """The shipped search space as a sweep of instant trials."""
    return load_spec(
        SPACE,
        [
            f"storage={folder}",
            f"search.trials={trials}",
            f"training.steps={steps}",
            "search.sampler=random",
            "search.replicates.max_runs=0",
        ],
        name,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="100 trials in place of 1,000")
    trials = 100 if parser.parse_args().small else 1000
    folder_of_this_file = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [folder_of_this_file, os.environ.get("PYTHONPATH")])
    )
    with tempfile.TemporaryDirectory() as folder:
        few = measure(sweep(folder, "few", trials, 1))
        many = measure(sweep(folder, "many", trials, MANY))
    per_trial = 1000 * few.cpu / few.trials
    further = (many.cpu - many.start) - (few.cpu - few.start)
    per_result = 1000 * further / (many.results - few.results)
    for run in (few, many):
        print(
            f"{run.trials} trials, {run.results} results: "
            f"CPU {run.cpu:.1f} s ({run.start:.1f} s until the first trial), wall {run.wall:.1f} s"
        )
    figures = {
        "benchmark": "driver",
        "trials": few.trials,
        "sampler": "random",
        "cpu_ms_per_trial": round(per_trial, 2),
        "cpu_ms_per_result": round(per_result, 3),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "limit_cpu_ms_per_trial": LIMIT_MS,
        "ok": per_trial <= LIMIT_MS,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
