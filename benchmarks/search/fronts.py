"""Fronts of real sweeps for equal completions: a divided budget against other plans.

    python benchmarks/search/fronts.py [--tasks code math tools] [--seeds 0 1 2] [--out DIRECTORY]
                                       [--rows halving informative sixteen equal random tpe]

For each task and seed, sweeps of `search_spaces/<task>.yaml` run with the ordinary command, as
many trials at a time as there are cores, and without replicates:

    halving  a wide rung of many configurations, then few long trainings: the default of a budget
    informative  the same, whose trainings prefer prompts with unequal rewards
    sixteen  16 configurations of 60 steps, with merges and checkpoints
    equal    five configurations of equal length, which a model proposes after three that span
    random   the same, drawn at random
    tpe      16 configurations of 60 steps by TPE, without merges and checkpoints

All completions count, those of evaluations included; the published baseline counts on every
side, the untrained policy on none. A sweep's front is chosen by its own test values. Then the
policies on it are evaluated on the test prompts with fresh seeds, and the hypervolume is that of
the new values: so no side gains by luck.

DIRECTORY keeps sweeps and evaluations, so that the same command resumes. It also gets `table.md`
and `fronts.png`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdpo_tune.analysis.pareto import compute_hypervolume
from gdpo_tune.analysis.replicates import Configuration, pool_trials
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.trials import Cost, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

SPACES = Path(__file__).resolve().parents[2] / "search_spaces"
BOXES = {"code": 1.0, "math": 1.0, "tools": 6.0}
"""Task -> largest hypervolume that its objectives allow."""
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
SIXTEEN = ("search.scheduler={type: fifo}", "search.budget.completions=0", "training.steps=60")
CONTESTANTS: Mapping[str, Sequence[str]] = {
    "halving": (),
    "informative": ("space.prompt_selection=informative",),
    "sixteen": SIXTEEN,
    "equal": (),
    "random": ("search.sampler=random",),
    "tpe": (
        *SIXTEEN,
        "search.sampler=tpe",
        "search.merges.budget=0",
        "search.checkpoints.budget=0",
    ),
}
"""Contestant -> its changes of the file."""
SMALL = ("training={validation_prompts: 8, test_prompts: 8}",)
SMALL_BUDGET = 4_608
"""Completions in training, for small runs: the least that pays for each mode twice."""


@dataclass(frozen=True)
class Side:
    """One sweep, and the values of its policies with fresh seeds."""

    task: str
    seed: int
    name: str
    spec: SweepSpec
    ended: Sequence[TrialRecord]
    """Trials that were paid for, by end."""

    def list_spent(self, price: Callable[[Cost], float]) -> list[float]:
        """Return the cost of all trials up to the end of each."""
        return [float(total) for total in np.cumsum([price(r.cost) for r in self.ended])]

    def choose_front(self, budget: float) -> list[Configuration]:
        """Return the front of the trials that ended within a budget, in completions."""
        spent = self.list_spent(count_completions)
        within = [r for r, by_then in zip(self.ended, spent, strict=True) if by_then <= budget]
        pooled = pool_trials(within, self.spec.list_objectives())
        return [candidate for candidate in pooled if candidate.is_on_front]


def count_completions(cost: Cost) -> float:
    """Return the completions of a trial, in training and in evaluations."""
    return cost.completions + cost.evaluation_completions


def run_sweep(task: str, seed: int, name: str, out: Path, changes: Sequence[str]) -> Side:
    """Run or resume a sweep by the command, and read its trials."""
    label = f"{task}-{name}-{seed}"
    space = SPACES / f"{task}.yaml"
    overrides = list_overrides(seed, out, ["keep=all", *CONTESTANTS[name], *changes])
    run_sweep_command(space, label, overrides, out)
    spec = load_spec(space, overrides, label)
    with Ledger.open(spec, read_only=True) as ledger:
        records = [r for r in ledger.get_records() if r.role != "untrained" and r.finished]
    records.sort(key=lambda record: (record.finished or 0.0, record.number))
    return Side(task, seed, name, spec, records)


def list_limits(task: str, name: str, *, small: bool) -> list[str]:
    """Return the settings by which a contestant spends about what it may."""
    training = SMALL_BUDGET if small else int(TRAINING[task] * TOTALS[task])
    if name in ("halving", "informative"):
        return [f"search.budget.completions={training}"]
    if name in ("equal", "random"):
        steps = training // (EQUAL_TRAININGS * COMPLETIONS_PER_STEP)
        fifo = ["search.scheduler={type: fifo}", "search.budget.completions=0"]
        return [*fifo, f"search.trials={EQUAL_TRAININGS - 1}", f"training.steps={steps}"]
    return []


def evaluate_fresh(side: Side, candidates: Sequence[Configuration], out: Path) -> dict[int, Any]:
    """Evaluate policies with fresh seeds; return the means of the objectives by number.

    What the directory has from an earlier run is not evaluated again.
    """
    file = out / f"{side.task}-{side.name}-{side.seed}.fresh.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    by_number = {record.number: record for record in side.ended}
    for candidate in candidates:
        if str(candidate.first) not in known:
            record = by_number[candidate.first]
            known[str(record.number)] = evaluate_policy(side.spec, record)
            file.write_text(json.dumps(known))
    return {int(number): values for number, values in known.items()}


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
            plain = spec.build_trial_config(params, seed, Path(directory))
            config = replace(plain, train=False)
            with open_worker_cache(config) as cache:
                model, sampler = load_for_evaluation(config, cache, record.checkpoint)
                found = Evaluator(config, cache, sampler).evaluate_test(model, 0)
        results.append({name: found[name].mean for name in spec.objectives})
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def measure(side: Side, out: Path) -> dict[str, Any]:
    """Build the figures of one sweep: its front with fresh seeds, and what was begun."""
    spent, goals = side.list_spent(count_completions)[-1], side.spec.list_objectives()
    front = side.choose_front(spent)
    fresh = evaluate_fresh(side, front, out)
    points = [[fresh[c.first][goal.name] for goal in goals] for c in front]
    roles = [record.role for record in side.ended]
    modes = [str(r.params["normalization"]) for r in side.ended if r.is_training]
    return {
        "share": round(spent / TOTALS[side.task], 3),
        "hypervolume": round(compute_hypervolume(points, goals), 4),
        "trials": {role: roles.count(role) for role in sorted({*roles})},
        "modes": {mode: modes.count(mode) for mode in sorted({*modes})},
        "training_completions": sum(r.cost.completions for r in side.ended),
        "evaluation_completions": sum(r.cost.evaluation_completions for r in side.ended),
        "cpu_seconds": round(sum(r.cost.cpu_seconds for r in side.ended), 1),
    }


def compare_sides(
    task: str, seed: int, names: Sequence[str], out: Path, *, small: bool
) -> dict[str, Any]:
    """Run the missing sweeps of one task and seed, and build their figures."""
    figures: dict[str, Any] = {"task": task, "seed": seed}
    for name in names:
        changes = [*(SMALL if small else ()), *list_limits(task, name, small=small)]
        figures[name] = measure(run_sweep(task, seed, name, out, changes), out)
    return figures


def render_markdown(figures: Sequence[Mapping[str, Any]]) -> str:
    """Render a row for each sweep."""
    lines = [
        "| task | seed | | completions | hypervolume | trainings, merges, checkpoints | modes "
        "| CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        for name in (key for key in CONTESTANTS if key in figure):
            row = figure[name]
            trials, spent = row["trials"], row["training_completions"]
            spent += row["evaluation_completions"]
            trained = sum(n for role, n in trials.items() if role not in ("merge", "checkpoint"))
            counts = f"{trained}, {trials.get('merge', 0)}, {trials.get('checkpoint', 0)}"
            modes = ", ".join(f"{count} {mode}" for mode, count in row["modes"].items())
            lines.append(
                f"| {figure['task']} | {figure['seed']} | {name} | {spent:,} "
                f"| {row['hypervolume']:.3f} | {counts} | {modes} | {row['cpu_seconds']:,.0f} |"
            )
    return "\n".join([*lines, ""])


def summarise(figures: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the median hypervolume of each contestant over the seeds, task by task."""
    return {
        name: {
            task: round(median(volumes), 4)
            for task in BOXES
            if (volumes := [f[name]["hypervolume"] for f in figures if f["task"] == task])
        }
        for name in names
    }


def compare(
    tasks: Sequence[str], seeds: Sequence[int], names: Sequence[str], out: Path, *, small: bool
) -> None:
    """Run the missing sweeps, write the report and print the figures."""
    out.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    for seed, task in product(seeds, tasks):
        figures.append(compare_sides(task, seed, names, out, small=small))
        (out / "table.md").write_text(render_markdown(figures), encoding="utf-8")
    write_fronts_picture(figures, names, out / "fronts.png")
    print(render_markdown(figures))
    found = {"benchmark": "search/fronts", **summarise(figures, names), "figures": figures}
    print(json.dumps(found))


def main() -> None:
    """Compare sweeps as the options say; a small run leaves no files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[*BOXES], choices=[*BOXES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=[*CONTESTANTS], choices=[*CONTESTANTS])
    parser.add_argument("--out", type=Path, default=Path("runs/search/fronts"))
    parser.add_argument("--small", action="store_true", help="one task and seed, short trials")
    options = parser.parse_args()
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            compare(["code"], [0], ["halving"], Path(directory), small=True)
        return
    compare(options.tasks, options.seeds, options.rows, options.out.absolute(), small=False)


COLORS = [mark.color for mark in style.MODES.values()]


def write_fronts_picture(
    figures: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path
) -> None:
    """Draw the hypervolume of each contestant against what it spent; write it atomically."""
    tasks = list(dict.fromkeys(figure["task"] for figure in figures))
    figure = Figure(figsize=(len(tasks) * 1.1 * SIDE, SIDE + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        for name, color in zip(names, COLORS, strict=False):
            rows = [f[name] for f in figures if f["task"] == task]
            shares, volumes = ([row[key] for row in rows] for key in ("share", "hypervolume"))
            axis.plot(shares, volumes, color=color, linewidth=0, marker=".", alpha=0.6)
            axis.plot(median(shares), median(volumes), color=color, marker="o", label=name)
        for volume in ONLY_CORNERS[task]:
            axis.axhline(volume, color=style.INK, linewidth=0.6, linestyle=":")
        found = [f[n]["hypervolume"] for f in figures if f["task"] == task for n in names]
        low, high = min(*found, *ONLY_CORNERS[task]), max(*found, *ONLY_CORNERS[task])
        axis.set(xlim=(0, 1.1), ylim=(0.9 * low, 1.05 * high))
        axis.set_title(f"{task}; dotted: only corners", size=10, color=style.INK)
        style_axis(axis, "completions, as a share of the budget", "hypervolume")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=FONT_SIZE
    )
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())


def list_overrides(seed: int, out: Path, changes: Sequence[str]) -> list[str]:
    """Return the overrides of a sweep without replicates that is kept in `out`."""
    return [
        f"search.seed={seed}",
        "search.replicates.max_runs=0",
        f"storage={out}",
        f"tracking.uri=sqlite:///{out}/mlflow.db",
        *changes,
    ]


def run_sweep_command(space: Path, name: str, overrides: Sequence[str], out: Path) -> None:
    """Run or resume a sweep; its output goes to `out/<name>.log`."""
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(space), "--name", name, *words]
    print(f"{name}: its output goes to {out / name}.log", flush=True)
    with (out / f"{name}.log").open("a", encoding="utf-8") as log:
        status = subprocess.run(command, check=False, stdout=log, stderr=log).returncode
    if status:
        raise SystemExit(
            f"{name} ended with status {status}; fix the cause, then run the same command to resume"
        )


if __name__ == "__main__":
    main()
