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
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from comparison import build_key, finish, read_done
from problems import (
    SHIPPED,
    Curves,
    Surrogate,
    compute_r_squared,
    encode_features,
    read_table,
    write_table,
)
from scipy.stats import spearmanr

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Rung
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.first_trials import draw_point

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
    params = spec.space.complete(draw_point(spec, index))
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


PACKAGES = ("gdpo-tune", "torch", "trl", "transformers")


def write_sheet(spec: SweepSpec, table: Path) -> None:
    """Write the sheet of a table atomically to a `.md` file beside the table."""
    text = render_sheet(spec, read_table(table), table.name)
    write_atomically(table.with_suffix(".md"), text.encode())


def render_sheet(spec: SweepSpec, curves: Curves, name: str) -> str:
    training = spec.training
    steps = [level // training.completions_per_step for level in curves.levels]
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    seconds = curves.cpu_seconds[:, -1]
    return "\n".join(
        [
            f"# Data sheet of `{name}`",
            "",
            f"Learning curves of {len(curves.params)} configurations of the task `{spec.task}`, "
            "each trained once, really, by `python benchmarks/search/curves.py`.",
            "",
            f"- **Policy:** `{spec.policy}`, which ships with the package; "
            f"**space:** `search_spaces/{spec.task}.yaml`, the first points of a scrambled Sobol "
            f"sequence (seed {spec.search.seed}); the seed of a training is the number of its "
            "configuration.",
            f"- **Budget:** {training.steps} steps of {training.completions_per_step} completions, "
            "one thread of a CPU.",
            f"- **Measured** after steps {', '.join(map(str, steps))} on "
            f"{training.validation_prompts} validation prompts, and at the end on "
            f"{training.test_prompts} test prompts, {training.samples_per_prompt} samples each at "
            "temperature 1. Standard errors: bootstrap clustered by prompt. They say how well a "
            "policy was measured, not how much another seed would have differed.",
            f"- **Made with** {versions}, Python {platform.python_version()}, "
            f"{platform.machine()}; {seconds.mean():.1f} CPU-s a training "
            f"({seconds.min():.1f} to {seconds.max():.1f}), {seconds.sum() / 3600:.2f} CPU-h in "
            "all, evaluations included. Values are equal on equal hardware and versions; the times "
            "are not.",
            "- **Licence:** Apache-2.0, as the package; no data from elsewhere is in it.",
            "",
            "## Columns",
            "",
            "| column | meaning |",
            "|---|---|",
            "| `configuration` | number of the configuration, and seed of its training |",
            *(f"| `{key}` | parameter |" for key in curves.params[0]),
            "| `split` | `validation`, or `test` in a configuration's last row |",
            "| `step`, `completions` | training done by then |",
            "| `seconds`, `cpu_seconds` | since the start, evaluations included |",
            "| metric, metric`.se` | mean over held-out completions, and its standard error |",
            "",
            "## What is in it",
            "",
            "Spearman correlation of a rung with the end, both on validation prompts; spread over "
            "configurations; noise.",
            "",
            *_render_correlations(curves, spec, steps),
            "",
            "R2: share of the variance of test values that a Gaussian process predicts of "
            "configurations left out. Deviation: how much one training differs from the process "
            "beyond its standard error: its seed, and whatever the process is too smooth for.",
            "",
            *_render_surrogates(curves, spec),
            "",
        ]
    )


def _render_correlations(curves: Curves, spec: SweepSpec, steps: list[int]) -> list[str]:
    lines = [
        f"| | {' | '.join(f'step {step}' for step in steps[:-1])} | at the end: lowest, median, "
        "highest | standard error |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for name in spec.objectives:
        values = curves.means[name]
        cells = [
            f"{_compute_spearman(values[:, c], values[:, -1]):.2f}" for c in range(len(steps) - 1)
        ]
        low, middle, high = np.percentile(values[:, -1], [0, 50, 100])
        cells.append(f"{low:.2f}, {middle:.2f}, {high:.2f}")
        cells.append(f"{np.median(curves.errors[name][:, -1]):.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _compute_spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Compute Spearman's correlation; NaN if one of the arrays is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(spearmanr(one, other).statistic)


def _render_surrogates(curves: Curves, spec: SweepSpec) -> list[str]:
    points = np.array(
        [encode_features(params, spec.space.searched_domains) for params in curves.params]
    )
    lines = ["| | R2 | deviation | standard error |", "|---|---|---|---|"]
    for name in spec.objectives:
        values, errors = curves.test_means[name], curves.test_errors[name]
        fit = Surrogate(points, values, errors)
        share = compute_r_squared(values, fit.predict_left_out())
        lines.append(f"| {name} | {share:.2f} | {fit.deviation:.3f} | {np.median(errors):.3f} |")
    return lines


if __name__ == "__main__":
    main()
