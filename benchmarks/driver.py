"""CPU time and memory of the search itself: a sweep of instant trials, without any training.

    python benchmarks/driver.py [--trials 10000] [--small]

Two sweeps, each in a process of its own, one after the other:

    ours    `run_sweep` over `search_spaces/code.yaml` with a number of trials in place of its
            budget: Ray Tune, the ledger with its journal, replicates of the front. The sampler is
            `random`, so the figures leave out the time of a model. Trials train nothing: they
            report where a trial is evaluated.
    Ray     the limit: Ray Tune alone, the same settings and slots, trials that report as often as
            ours.

CPU time is that of the driver's process (all of its threads) from the call to its return, divided
by all trials; it includes imports and the start and end of Ray. Samples during the sweep give the
CPU time of a trial in the first and in the last tenth. Memory is the resident set: growth is the
slope of a line through the samples after the first `WARM_UP` of all trials.

The last line is JSON: CPU milliseconds a trial, MiB and their growth, of both; limit.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import call_apart, load_space, run

from gdpo_tune.core.events import Event, TrialFinished, TrialProgress, TrialStarted
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome, Report
from gdpo_tune.spec import SweepSpec

LIMIT_MS = 15.0
"""Most CPU milliseconds of the driver for each trial."""
SAMPLES = 50
"""Number of samples of memory and CPU time in a sweep."""
WARM_UP = 0.2
"""Share of a sweep after which memory must be flat."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Run an instant trial: report each evaluation, then return an outcome."""
    del resume
    rng = np.random.default_rng(config.seed)
    values = compute_worth(config)
    last, every = config.training.steps, config.training.evaluate_every
    steps = sorted({*config.evaluate_at, *range(every, last, every), last})
    for step in steps:
        share = step / last
        estimates = {
            name: Estimate(value * share**0.5 + 0.02 * rng.standard_normal(), 0.02)
            for name, value in values.items()
        }
        cost = Cost(step * config.training.completions_per_step, share, share)
        flat = {f"validation/{name}": estimate.mean for name, estimate in estimates.items()}
        report(Measurement(step, flat, cost, estimates), None)
    return Outcome(estimates, estimates, cost, None)


def compute_worth(config: TrialConfig) -> dict[str, float]:
    """Compute a trial's objectives without noise.

    Reward weights trade objectives off; the learning rate scales all of them.
    """
    weights = config.get_reward_weights()
    rate = float(config.params["learning_rate"])
    quality = float(np.exp(-(np.log(rate / 1.0e-4) ** 2)))
    total = sum(weights.values())
    return {name: quality * (weight / total) ** 0.5 for name, weight in weights.items()}


@dataclass
class Samples:
    """CPU seconds and memory of this process, by trials that have ended."""

    every: int
    trials: list[int] = field(default_factory=list[int])
    cpu: list[float] = field(default_factory=list[float])
    mib: list[float] = field(default_factory=list[float])

    def take(self, ended: int) -> None:
        """Take a sample if one is due."""
        if ended % self.every == 0:
            self.trials.append(ended)
            self.cpu.append(time.process_time())
            self.mib.append(psutil.Process().memory_info().rss / 2**20)

    def compute_ms_per_trial(self, start: float, end: float) -> float:
        """Compute the CPU milliseconds of a trial between two shares of the sweep."""
        first, last = (round(share * (len(self.trials) - 1)) for share in (start, end))
        cpu = self.cpu[last] - self.cpu[first]
        return 1000 * cpu / (self.trials[last] - self.trials[first])

    def compute_growth(self) -> float:
        """Compute the MiB that 1,000 trials add after warm-up."""
        first = round(WARM_UP * (len(self.trials) - 1))
        return 1000 * float(np.polyfit(self.trials[first:], self.mib[first:], 1)[0])


@dataclass(frozen=True)
class Run:
    """Measurements of one sweep."""

    samples: Samples
    cpu: float
    """Seconds."""
    wall: float
    states: Counter[str]
    results: Counter[int]
    """Trials by the number of their results."""

    def build_figures(self) -> dict[str, Any]:
        trials = self.states.total()
        results = sum(count * having for count, having in self.results.items())
        return {
            "trials": dict(+self.states),
            "results_per_trial": round(results / trials, 2),
            "cpu_ms_per_trial": round(1000 * self.cpu / trials, 2),
            "cpu_ms_per_trial_of_first_tenth": round(self.samples.compute_ms_per_trial(0, 0.1), 2),
            "cpu_ms_per_trial_of_last_tenth": round(self.samples.compute_ms_per_trial(0.9, 1), 2),
            "mib_at_start": round(self.samples.mib[0]),
            "mib_at_end": round(self.samples.mib[-1]),
            "mib_per_1000_trials": round(self.samples.compute_growth(), 2),
            "wall_seconds": round(self.wall, 1),
        }


def run_ours(spec: SweepSpec) -> Run:
    """Run and measure the sweep that users get."""
    wall, cpu = time.perf_counter(), time.process_time()
    from gdpo_tune.tuning.runner import run_sweep

    samples = Samples(max(1, spec.search.trials // SAMPLES))
    results: Counter[int] = Counter()
    ended = 0

    def listen(event: Event) -> None:
        nonlocal ended
        if isinstance(event, TrialStarted) and not samples.trials:
            samples.take(0)
        elif isinstance(event, TrialProgress):
            results[event.number] += 1
        elif isinstance(event, TrialFinished):
            ended += 1
            samples.take(ended)

    done = run_sweep(spec, listeners=[listen], train="driver:train")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    states = Counter(record.state for record in done.records)
    return Run(samples, cpu, wall, states, Counter(results.values()))


def run_ray(spec: SweepSpec, counts: Sequence[int]) -> Run:
    """Run and measure Ray Tune alone; `counts` are the numbers of results, one for each trial."""
    wall, cpu = time.perf_counter(), time.process_time()
    # Ray's workers import the trainable by this module name, not as `__main__`.
    from driver import report_only
    from ray import tune

    from gdpo_tune.tuning.ray.cluster import open_cluster

    samples = Samples(max(1, spec.search.trials // SAMPLES))
    ended = 0

    class Count(tune.Callback):
        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            if not samples.trials:
                samples.take(0)

        def on_trial_complete(
            self, iteration: int, trials: list[Any], trial: Any, **_: Any
        ) -> None:
            nonlocal ended
            ended += 1
            samples.take(ended)

    spec.directory.mkdir(parents=True)
    with open_cluster(spec.directory / "ray.processes"):
        tune.Tuner(
            tune.with_resources(report_only, {"cpu": spec.resources.cpus}),
            param_space={"results": tune.grid_search(list(counts))},
            tune_config=tune.TuneConfig(reuse_actors=True),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str(spec.directory.absolute()),
                verbose=0,
                callbacks=[Count()],
            ),
        ).fit()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    states = Counter(complete=ended, failed=len(counts) - ended)
    return Run(samples, cpu, wall, states, Counter(counts))


def report_only(config: dict[str, Any]) -> dict[str, float]:
    """Report `config["results"]` results; the trainable for Ray Tune alone."""
    from ray import tune

    for _ in range(config["results"]):
        tune.report({"loss": 0.5})
    return {"loss": 0.5}


def print_run(name: str, run: Run) -> Run:
    if run.states["failed"]:
        raise SystemExit(f"{name}: {run.states['failed']} trials failed: the figures are not valid")
    for at, cpu, mib in zip(run.samples.trials, run.samples.cpu, run.samples.mib, strict=True):
        print(f"{name}, {at:6d} trials: CPU {cpu:.1f} s, {mib:.0f} MiB")
    print(f"{name}, in all: CPU {run.cpu:.1f} s", flush=True)
    return run


def measure(trials: int = 10_000):
    """Measure both sweeps."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does
    changes = (
        f"search.trials={trials}",
        "search.budget.completions=0",
        "search.sampler=random",
    )
    with load_space("code", *changes) as spec:
        ours = print_run("ours", call_apart(run_ours, spec))
    counts = [count for count, many in ours.results.items() for _ in range(many)]
    with load_space("code", *changes) as spec:
        ray = print_run("Ray", call_apart(run_ray, spec, counts))
    return {
        "sampler": "random",
        "scheduler": "fifo",
        **ours.build_figures(),
        "ray_alone": ray.build_figures(),
        "limit_cpu_ms_per_trial": LIMIT_MS,
        "ok": 1000 * ours.cpu / ours.states.total() <= LIMIT_MS,
    }


if __name__ == "__main__":
    run(measure, {"trials": 100})
