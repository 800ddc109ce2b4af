"""Real learning curves of configurations of the embedded word problems.

    python benchmarks/search/curves.py [--configurations 160] [--processes 2] [--out DIRECTORY]

Configurations are the first points of a scrambled Sobol sequence over the space of
`search_spaces/math.yaml`. Each is trained with its own seed for the file's full budget. It is
measured on validation prompts at every rung and on test prompts at the end. Standard errors are by
a bootstrap clustered by prompt. DIRECTORY/trainings.jsonl keeps every finished training, so that
the same command resumes after a kill, or with more configurations. At the end, and with
`--only-table` at any time, all trainings so far are written to `curves_math.parquet` beside this
script (`--table FILE` for another path), with a data sheet, `curves_math.md`.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kept import build_key, finish, read_done
from sheet import write_sheet
from table import SHIPPED, write_table

from gdpo_tune.core.trials import Cost, Estimate, Measurement, Rung
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning import startup

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "math.yaml"
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
    params = spec.space.complete(startup.draw_point(spec, index))
    rungs: list[Rung] = []

    def keep(measurement: Measurement, checkpoint: Path | None) -> None:
        del checkpoint
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


def list_jobs(
    count: int, steps: tuple[int, ...], overrides: tuple[str, ...]
) -> list[dict[str, Any]]:
    """List a job for each configuration."""
    return [
        {"configuration": index, "steps": list(steps), "overrides": list(overrides)}
        for index in range(count)
    ]


def main() -> None:
    """Train the missing configurations, then write table and data sheet."""
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
            small = list_jobs(2, SMALL_STEPS, SMALL)
            run_jobs(small, options.processes, Path(directory), Path(directory) / SHIPPED.name)
        return
    jobs = list_jobs(options.configurations, STEPS, ())
    if options.only_table:
        done = read_done(options.out / "trainings.jsonl")
        jobs = [job for job in jobs if build_key(job) in done]
    run_jobs(jobs, options.processes, options.out, options.table)


def run_jobs(jobs: list[dict[str, Any]], processes: int, out: Path, table: Path) -> None:
    """Finish all jobs, write table and data sheet, print the figures."""
    if not jobs:
        raise SystemExit(f"no training in {out} yet")
    spec = load_spec(SPACE, jobs[0]["overrides"])
    last = jobs[0]["steps"][-1]
    if last != spec.training.steps:
        raise SystemExit(f"{SPACE} trains {spec.training.steps} steps, and the rungs end at {last}")
    trainings = finish(jobs, train_one, out / "trainings.jsonl", processes)
    write_table(jobs, trainings, table)
    write_sheet(spec, table)
    seconds = [training["test"]["cpu_seconds"] for training in trainings]
    print(f"{table}: {table.stat().st_size / 1024:.0f} KiB")
    result = {
        "benchmark": "search/curves",
        "configurations": len(trainings),
        "steps": jobs[0]["steps"],
        "cpu_seconds": round(sum(seconds), 1),
        "cpu_seconds_each": round(sum(seconds) / len(seconds), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
