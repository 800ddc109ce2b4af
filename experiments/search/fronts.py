"""Fronts of real sweeps for equal completions: a divided budget against other plans.

    python experiments/search/fronts.py [--tasks code math tools] [--seeds 0 1 2] [--out DIRECTORY]
                                        [--rows halving informative sixteen equal random tpe]

docs/growth.md has the figures of `halving`, commits b178c7f6 and 1faf5621 of 2026-11-28, and
docs/search.md older ones: commit 7f2110ed of 2026-11-27. The problems are those that the tasks
write themselves.

For each task and seed, sweeps of `search_spaces/<task>.yaml` run with the ordinary command, as
many trials at a time as there are cores, and without replicates:

    halving  a wide rung of many configurations, then few long trainings: the default of a budget
    informative  the same, whose trainings prefer prompts with unequal rewards
    sixteen  16 configurations of 60 steps, with merges and checkpoints
    equal    five configurations of equal length, which a model proposes after three that span
    random   the same, drawn at random
    tpe      16 configurations of 60 steps by TPE, without merges and checkpoints

All completions count, those of evaluations and of the published baseline included. A sweep's front
is chosen by its own test values. Then its policies are evaluated on the test prompts with fresh
seeds, and the hypervolume is that of the new values: so no side gains by luck. DIRECTORY keeps
sweeps and evaluations, so that the same command resumes, and gets `table.md` and `fronts.png`. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdpo_tune.analysis.pareto import compute_hypervolume
from gdpo_tune.analysis.replicates import pool_trials
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

SPACES = Path(__file__).resolve().parents[2] / "search_spaces"
FRESH_SEEDS = (1_000_001, 1_000_002)
"""Seeds of the evaluations that are compared; no trial has them."""
TOTALS = {"code": 83_000, "math": 83_000, "tools": 60_500}
"""Task -> completions of a sweep, those of evaluations included: what the divided budget of commit
2de9f153 has spent, whose fronts docs/growth.md lists."""
TRAINING = {"code": 0.77, "math": 0.735, "tools": 0.73}
"""Task -> share of them in training, of a divided budget: evaluations take the rest."""
ONLY_CORNERS = {
    "code": (0.575, 0.558, 0.598),
    "math": (0.521, 0.528, 0.516),
    "tools": (5.05, 5.05, 5.01),
}
"""Task -> hypervolumes of three seeds of that commit, which trained five configurations of gdpo."""
COMPLETIONS_PER_STEP, EQUAL_TRAININGS = 64, 5
FIFO = ("search.scheduler={type: fifo}", "search.budget.completions=0")
ENDS_ONLY = ("search.merges.budget=0", "search.checkpoints.budget=0")
ROWS: Mapping[str, Sequence[str]] = {
    "halving": (),
    "informative": ("space.prompt_selection=informative",),
    "sixteen": (*FIFO, "training.steps=60"),
    "equal": FIFO,
    "random": (*FIFO, "search.sampler=random"),
    "tpe": (*FIFO, "training.steps=60", "search.sampler=tpe", *ENDS_ONLY),
}
"""Row -> its changes of the file."""
SMALL = "training={validation_prompts: 8, test_prompts: 8}"
SMALL_BUDGET = 4_608
"""Completions in training, for small runs: the least that pays for each mode twice."""


def list_overrides(task: str, seed: int, name: str, out: Path, *, small: bool) -> list[str]:
    """Return the overrides of a sweep that spends about what it may and is kept in `out`."""
    training = SMALL_BUDGET if small else int(TRAINING[task] * TOTALS[task])
    changes = [
        f"search.seed={seed}",
        "search.replicates.max_runs=0",
        f"storage={out}",
        f"tracking.uri=sqlite:///{out}/mlflow.db",
        "keep=all",
        *ROWS[name],
        *([SMALL] if small else []),
    ]
    if name in ("halving", "informative"):
        changes.append(f"search.budget.completions={training}")
    elif name in ("equal", "random"):
        steps = training // (EQUAL_TRAININGS * COMPLETIONS_PER_STEP)
        changes += [f"search.trials={EQUAL_TRAININGS - 1}", f"training.steps={steps}"]
    return changes


def run_sweep(space: Path, label: str, overrides: Sequence[str], out: Path) -> SweepSpec:
    """Run or resume a sweep by the command, whose output goes to `out/<label>.log`."""
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(space), "--name", label, *words]
    print(f"{label}: its output goes to {out / label}.log", flush=True)
    with (out / f"{label}.log").open("a", encoding="utf-8") as log:
        status = subprocess.run(command, check=False, stdout=log, stderr=log).returncode
    if status:
        fix = "fix the cause, then run the same command to resume"
        raise SystemExit(f"{label} ended with status {status}; {fix}")
    return load_spec(space, overrides, label)


def evaluate_policy(spec: SweepSpec, record: TrialRecord) -> dict[str, float]:
    """Return the mean of each objective over the fresh seeds, on test prompts."""
    # not at the top: they change filters of warnings
    from gdpo_tune.training.evaluation import Evaluator
    from gdpo_tune.training.trial import load_for_evaluation
    from gdpo_tune.training.worker_cache import open_worker_cache

    assert record.checkpoint is not None, "the sweep keeps all policies"
    results: list[dict[str, float]] = []
    for seed in FRESH_SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            params = record.params or spec.space.complete_baseline({})
            config = replace(spec.build_trial_config(params, seed, Path(directory)), train=False)
            with open_worker_cache(config) as cache:
                model, sampler = load_for_evaluation(config, cache, record.checkpoint)
                found = Evaluator(config, cache, sampler).evaluate_test(model, 0)
        results.append({name: found[name].mean for name in spec.objectives})
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def measure(task: str, seed: int, name: str, out: Path, *, small: bool) -> dict[str, Any]:
    """Run a sweep, and build its figures: its front with fresh seeds, and what was begun.

    What the directory has from an earlier run is not evaluated again.
    """
    label = f"{task}-{name}-{seed}"
    overrides = list_overrides(task, seed, name, out, small=small)
    spec = run_sweep(SPACES / f"{task}.yaml", label, overrides, out)
    with Ledger.open(spec, read_only=True) as ledger:
        ended = [r for r in ledger.get_records() if r.role != "untrained" and r.finished]
    goals = spec.list_objectives()
    front = [one.first for one in pool_trials(ended, goals) if one.is_on_front]
    file = out / f"{label}.fresh.json"
    fresh = json.loads(file.read_text()) if file.exists() else {}
    for record in ended:
        if record.number in front and str(record.number) not in fresh:
            fresh[str(record.number)] = evaluate_policy(spec, record)
            file.write_text(json.dumps(fresh))
    points = [[fresh[str(number)][goal.name] for goal in goals] for number in front]
    spent = sum(r.cost.completions + r.cost.evaluation_completions for r in ended)
    return {
        "task": task,
        "seed": seed,
        "row": name,
        "completions": spent,
        "share": round(spent / TOTALS[task], 3),
        "hypervolume": round(compute_hypervolume(points, goals), 4),
        "trials": dict(Counter(sorted(record.role for record in ended))),
        "modes": dict(Counter(sorted(r.params["normalization"] for r in ended if r.is_training))),
        "cpu_seconds": round(sum(r.cost.cpu_seconds for r in ended), 1),
    }


def render_markdown(figures: Sequence[Mapping[str, Any]]) -> str:
    """Render a row for each sweep."""
    keys = ("task", "seed", "row", "completions", "hypervolume", "trials", "modes", "cpu_seconds")
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    for row in figures:
        lines.append(f"| {' | '.join(str(row[key]) for key in keys)} |")
    return "\n".join([*lines, ""])


def write_picture(figures: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the hypervolume of each row against what it spent; write it atomically."""
    tasks, names = (list(dict.fromkeys(row[key] for row in figures)) for key in ("task", "row"))
    figure = Figure(figsize=(len(tasks) * 1.1 * SIDE, SIDE + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    colors = [mark.color for mark in style.MODES.values()]
    for axis, task in zip(axes, tasks, strict=True):
        for name, color in zip(names, colors, strict=False):
            rows = [row for row in figures if (row["task"], row["row"]) == (task, name)]
            shares, volumes = ([row[key] for row in rows] for key in ("share", "hypervolume"))
            axis.plot(shares, volumes, color=color, linewidth=0, marker=".", alpha=0.6)
            axis.plot(median(shares), median(volumes), color=color, marker="o", label=name)
        for volume in ONLY_CORNERS[task]:
            axis.axhline(volume, color=style.INK, linewidth=0.6, linestyle=":")
        found = [row["hypervolume"] for row in figures if row["task"] == task]
        low, high = min(*found, *ONLY_CORNERS[task]), max(*found, *ONLY_CORNERS[task])
        axis.set(xlim=(0, 1.1), ylim=(0.9 * low, 1.05 * high))
        axis.set_title(f"{task}; dotted: only corners", size=10, color=style.INK)
        style_axis(axis, "completions, as a share of the budget", "hypervolume")
    handles, labels = axes[0].get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": 5, "frameon": False}
    figure.legend(handles, labels, fontsize=FONT_SIZE, **place)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())


def compare(
    tasks: Sequence[str], seeds: Sequence[int], names: Sequence[str], out: Path, *, small: bool
) -> None:
    """Run the missing sweeps, write the report and print the figures."""
    out.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    for seed, task, name in product(seeds, tasks, names):
        figures.append(measure(task, seed, name, out, small=small))
        (out / "table.md").write_text(render_markdown(figures), encoding="utf-8")
    write_picture(figures, out / "fronts.png")
    print(render_markdown(figures))
    print(json.dumps({"benchmark": "search/fronts", "figures": figures}))


def main() -> None:
    """Compare sweeps as the options say; a small run leaves no files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[*TOTALS], choices=[*TOTALS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--out", type=Path, default=Path("runs/search/fronts"))
    parser.add_argument("--small", action="store_true", help="one task and seed, short trials")
    options = parser.parse_args()
    if not options.small:
        compare(options.tasks, options.seeds, options.rows, options.out.absolute(), small=False)
        return
    with tempfile.TemporaryDirectory() as directory:
        compare(["code"], [0], ["halving"], Path(directory), small=True)


if __name__ == "__main__":
    main()
