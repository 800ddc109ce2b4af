"""CPU time, wall time and size of the report of a sweep of many trials.

    python benchmarks/report_cost.py [--trials 1000] [--small]

A synthetic sweep of `search_spaces/code.yaml`: trials over all of its space, one in ten pruned or
failed, replicates, 60 steps of metrics and completions in every trial's directory. The report is
written from the records, as `python -m gdpo_tune.report` does after it reads the ledger.

The last line is JSON: seconds, CPU seconds, megabytes, and their limits.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from harness import load_space, run, time_cpu

from gdpo_tune.core.trial_files import Completion, append_step, write_completions
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Role, State, TrialRecord
from gdpo_tune.figures.report_page import write_report
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.spec import SweepSpec

LIMIT_SECONDS, LIMIT_MB = 20.0, 10.0
STEPS = 60


def build_records(spec: SweepSpec, trials: int) -> list[TrialRecord]:
    """Build records and write their directories; equal arguments give equal records."""
    rng = np.random.default_rng(0)
    records: list[TrialRecord] = []
    for number in range(trials):
        params = {
            "normalization": str(rng.choice(["gdpo", "grpo", "grpo_no_std"])),
            "group_size": int(rng.choice([4, 8])),
            "learning_rate": float(10 ** rng.uniform(-4.5, -3.5)),
            "reward_weights.correctness": 1.0,
            "reward_weights.format": float(10 ** rng.uniform(-1.3, 0.3)),
            "reward_weights.length": float(10 ** rng.uniform(-1.3, 0.3)),
        }
        role: Role = "search"
        of = None
        if number and number % 12 == 0:
            role, of = "replicate", int(rng.integers(number))
            of = records[of].replicate_of if records[of].role == "replicate" else of
            params = dict(records[of or 0].params)
        state: State = "complete"
        if rng.random() < 0.1:
            state = "pruned" if rng.random() < 0.8 else "failed"
        records.append(_build_record(spec, number, role, state, params, of, rng))
    return records


def _build_record(
    spec: SweepSpec,
    number: int,
    role: Role,
    state: State,
    params: dict[str, str | int | float],
    of: int | None,
    rng: np.random.Generator,
) -> TrialRecord:
    weights = np.array([1.0, params["reward_weights.format"], params["reward_weights.length"]])
    means = 0.9 * np.sqrt(weights / weights.sum()) + rng.normal(0, 0.03, 3)
    estimates = {
        name: Estimate(float(value), 0.02)
        for name, value in zip(spec.objectives, means, strict=True)
    }
    seconds = float(rng.uniform(20, 40))
    directory = spec.directory / "trials" / str(number)
    _write_directory(directory, rng)
    return TrialRecord(
        number=number,
        role=role,
        state=state,
        params=params,
        seed=number,
        proposer="model",
        replicate_of=of,
        validation=estimates if state == "complete" else {},
        test=estimates if state == "complete" else {},
        feasible=estimates["correctness"].mean >= 0.2 if state == "complete" else None,
        cost=Cost(64 * STEPS, seconds, seconds),
        reason="" if state == "complete" else "dominated at 1,280 completions",
        directory=directory,
        started=15.0 * number,
        finished=15.0 * number + seconds,
    )


def _write_directory(directory: Path, rng: np.random.Generator) -> None:
    for step in range(1, STEPS + 1):
        metrics = {
            f"train/rewards/{reward}/{kind}": float(rng.random())
            for reward in ("correctness", "format", "length")
            for kind in ("mean", "frac_reward_zero_std", "share")
        }
        append_step(directory, Measurement(step, metrics, Cost(64 * step, step, step)))
    completion = Completion(
        "Write a function.\n" * 8, "<think>x</think>\n" * 20, {"correctness": 1.0}
    )
    write_completions(directory, [completion] * 6)


def measure(trials: int = 1000):
    """Write a report once."""
    with load_space() as spec:
        records, wall = build_records(spec, trials), time.perf_counter()
        path, cpu = time_cpu(lambda: write_report(Sweep(spec, records)))
        wall, megabytes = time.perf_counter() - wall, path.stat().st_size / 1e6
    print(f"{trials} trials: {wall:.1f} s, {cpu:.1f} CPU-s, {megabytes:.1f} MB")
    limits = {"limit_seconds": LIMIT_SECONDS, "limit_megabytes": LIMIT_MB}
    figures = {"trials": trials, "seconds": wall, "cpu_seconds": cpu, "megabytes": megabytes}
    return {**figures, **limits}


if __name__ == "__main__":
    run(measure, {"trials": 50})
