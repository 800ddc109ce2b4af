"""Real learning curves of configurations of the embedded word problems.

    python experiments/search/curves.py [--configurations 160] [--processes 2] [--out DIRECTORY]

The table that ships, `curves_math.parquet`, is of commit 7aba17f3 of 2026-11-21; its data sheet,
`curves_math.md`, says what is in it.

Configurations are the first points of a scrambled Sobol sequence over the space of
`search_spaces/math.yaml`. Each is trained with its own seed for the file's full budget, and
measured on validation prompts at every rung and on test prompts at the end. DIRECTORY keeps the
trainings in `trainings.jsonl`, so that the same command resumes. At the end, and with
`--only-table` at any time, all trainings so far are written to `--table FILE`, and the figures of
the data sheet are printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from problems import ERROR, MEASURED, SHIPPED, SPACE, Curves, Surrogate, encode_features, read_table
from scipy.stats import spearmanr

sys.path.append(str(Path(__file__).resolve().parents[1]))
from jobs import build_key, finish, read_done

from gdpo_tune.core.trials import Cost, Estimate, Measurement, Rung
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.first_trials import draw_point

STEPS = (4, 7, 10, 14, 20, 30, 40, 50, 60)
"""Rungs: nearly those of halving by 2, 3 and 4 with any grace period."""
SMALL = ("training.steps=2", "training.validation_prompts=8", "training.test_prompts=8")
SMALL_STEPS = (1, 2)


def train_one(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train one configuration; return its measurements as JSON values."""
    # Not at the top: `--only-table` needs no torch.
    from gdpo_tune.training import train

    spec = load_spec(SPACE, job["overrides"])
    index = job["configuration"]
    params = spec.space.complete(draw_point(spec, index))
    rungs: list[Rung] = []

    def keep(measurement: Measurement, checkpoint: Path | None) -> None:
        if measurement.has_validation:
            rungs.append(Rung(measurement.step, measurement.validation, measurement.cost))

    with tempfile.TemporaryDirectory() as directory:
        config = spec.build_trial_config(params, index, Path(directory))
        outcome = train(replace(config, evaluate_at=tuple(job["steps"])), resume=None, report=keep)
    return {
        "params": {name: params[name] for name in spec.space.dimensions},
        "rungs": [_to_json(rung.step, "validation", rung.validation, rung.cost) for rung in rungs],
        "test": _to_json(spec.training.steps, "test", outcome.test, outcome.cost),
    }


def _to_json(step: int, split: str, values: Mapping[str, Estimate], cost: Cost) -> dict[str, Any]:
    estimates = {name: [value.mean, value.se] for name, value in values.items()}
    return {"step": step, "split": split, "values": estimates, **asdict(cost)}


def list_jobs(count: int, steps: Sequence[int], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """List a job for each configuration."""
    about = {"steps": list(steps), "overrides": list(overrides)}
    return [{"configuration": index, **about} for index in range(count)]


def write_table(
    jobs: Sequence[Mapping[str, Any]], trainings: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Write trainings as Parquet, configuration by configuration."""
    rows: list[dict[str, Any]] = []
    for job, training in zip(jobs, trainings, strict=True):
        for measured in (*training["rungs"], training["test"]):
            about = {name: measured[name] for name in MEASURED}
            means = {name: mean for name, (mean, _) in measured["values"].items()}
            errors = {f"{name}{ERROR}": se for name, (_, se) in measured["values"].items()}
            first = {"configuration": job["configuration"], **training["params"]}
            rows.append(first | about | means | errors)
    pd.DataFrame(rows).to_parquet(path, compression="zstd", index=False)


def print_sheet(spec: SweepSpec, curves: Curves) -> None:
    """Print the tables of the data sheet: correlations with the end, and what surrogates say."""
    points = np.array(
        [encode_features(params, spec.space.searched_domains) for params in curves.params]
    )
    steps = [level // spec.training.completions_per_step for level in curves.levels]
    for name in spec.objectives:
        ends, errors = curves.means[name][:, -1], curves.errors[name][:, -1]
        with np.errstate(invalid="ignore"):
            found = [spearmanr(column, ends).statistic for column in curves.means[name].T[:-1]]
        shares = ", ".join(f"{s}: {r:.2f}" for s, r in zip(steps[:-1], found, strict=True))
        spread = ", ".join(f"{end:.2f}" for end in np.percentile(ends, [0, 50, 100]))
        print(f"{name}: correlation of steps with the end: {shares}")
        print(f"{name}: ends {spread}, standard error {np.median(errors):.3f}")
        values, errors = curves.test_means[name], curves.test_errors[name]
        fit = Surrogate(points, values, errors)
        rest = ((values - fit.predict_left_out()) ** 2).sum()
        share = 1 - rest / ((values - values.mean()) ** 2).sum() if np.ptp(values) else np.nan
        middle = np.median(errors)
        print(f"{name}: R2 {share:.2f}, deviation {fit.deviation:.3f}, standard error {middle:.3f}")


def run_jobs(jobs: list[dict[str, Any]], processes: int, out: Path, table: Path) -> None:
    """Finish all jobs, write the table, print its sheet and the figures."""
    if not jobs:
        raise SystemExit(f"no training in {out} yet")
    spec = load_spec(SPACE, jobs[0]["overrides"])
    last = jobs[0]["steps"][-1]
    if last != spec.training.steps:
        raise SystemExit(f"{SPACE} trains {spec.training.steps} steps, and the rungs end at {last}")
    trainings = finish(jobs, train_one, out / "trainings.jsonl", processes)
    write_table(jobs, trainings, table)
    print_sheet(spec, read_table(table))
    seconds = sum(training["test"]["cpu_seconds"] for training in trainings)
    about = {"benchmark": "search/curves", "configurations": len(trainings)}
    print(json.dumps({**about, "steps": jobs[0]["steps"], "cpu_seconds": round(seconds, 1)}))


def main() -> None:
    """Train the missing configurations, then write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configurations", type=int, default=160)
    parser.add_argument("--processes", type=int, default=1, help="trainings side by side")
    parser.add_argument("--out", type=Path, default=Path("runs/search/curves"))
    parser.add_argument("--table", type=Path, default=SHIPPED)
    parser.add_argument("--only-table", action="store_true", help="train nothing more")
    parser.add_argument("--small", action="store_true", help="seconds: shows that it runs")
    options = parser.parse_args()
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            small, out = list_jobs(2, SMALL_STEPS, SMALL), Path(directory)
            run_jobs(small, options.processes, out, out / SHIPPED.name)
        return
    jobs = list_jobs(options.configurations, STEPS, ())
    if options.only_table:
        done = read_done(options.out / "trainings.jsonl")
        jobs = [job for job in jobs if build_key(job) in done]
    run_jobs(jobs, options.processes, options.out, options.table)


if __name__ == "__main__":
    main()
