"""Fronts of real sweeps for equal completions: a divided budget against a fixed plan.

    python benchmarks/search/fronts.py [--tasks code math tools] [--seeds 3] [--out DIRECTORY]
                                       [--rows auto equal random asha promote tpe]

For each task and seed, sweeps of `search_spaces/<task>.yaml` run with the ordinary command, one
trial at a time and without replicates:

    fixed    16 configurations of 60 steps, of which ASHA stops some; merges and checkpoints
    auto     `search.plan: auto`, with a budget for what `fixed` has spent at its end
    third    the same for a third of it
    equal    four configurations of equal length: three that span the weights, and one of a model
    random   four configurations of equal length, drawn at random
    asha     up to 16 configurations of that length, of which ASHA stops some
    promote  the same, but what it would stop waits
    tpe      16 configurations of 60 steps by TPE, without merges, checkpoints and stops

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
from gdpo_tune.spec.model import FULL_TRAININGS

SPACES = Path(__file__).resolve().parents[2] / "search_spaces"
SHARES = (1 / 3, 2 / 3, 1.0)
"""Shares of what `fixed` spends at which its own front is measured."""
BOXES = {"code": 1.0, "math": 1.0, "tools": 6.0}
"""Task -> largest hypervolume that its objectives allow."""
FRESH_SEEDS = (1_000_001, 1_000_002)
"""Seeds of the evaluations that are compared; no trial has them."""
COMPLETIONS_PER_STEP = 64
EVALUATED, RUNGS = 0.3, 4_000
"""Completions of evaluating merges for each one in training, and of evaluations at rungs."""
PLAN = ("search.plan=fixed", "search.budget.completions=0")
EQUAL = (*PLAN, "search.trials=4", "search.scheduler={type: fifo}")
SIXTEEN = (*PLAN, "search.trials=16", "training.steps=60")
CONTESTANTS: Mapping[str, Sequence[str]] = {
    "fixed": (*SIXTEEN, "search.scheduler={type: asha}"),
    "auto": (),
    "third": (),
    "equal": EQUAL,
    "random": (*EQUAL, "search.sampler=random"),
    "asha": (*PLAN, "search.trials=16", "search.scheduler={type: asha}"),
    "promote": (*PLAN, "search.trials=16", "search.scheduler={type: asha, variant: promote}"),
    "tpe": (
        *SIXTEEN,
        "search.sampler=tpe",
        "search.scheduler={type: fifo}",
        "search.merges.budget=0",
        "search.checkpoints.budget=0",
    ),
}
"""Contestant -> its changes of the file."""
SMALL = ("training={validation_prompts: 8, test_prompts: 8}",)
SMALL_PLAN = ("search.trials=3", "training.steps=4")
LEAST_BUDGET = 4_096
"""Completions, for small runs."""


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


def list_limits(name: str, total: float, *, small: bool) -> list[str]:
    """Return the settings by which a contestant spends about `total` completions, or a third."""
    if name in ("fixed", "tpe"):
        return [*SMALL_PLAN] if small else []
    share = 1 / 3 if name == "third" else 1.0
    training = max(LEAST_BUDGET, int((share * total - RUNGS) / (1 + EVALUATED)))
    steps = int(training / (FULL_TRAININGS * COMPLETIONS_PER_STEP))
    lengths = [f"training.steps={steps}", f"training.evaluate_every={steps}"]
    if name in ("equal", "random"):
        return lengths
    budget = f"search.budget.completions={training}"
    if name in ("asha", "promote"):
        return [budget, *lengths]
    return ["search.plan=auto", "search.scheduler={type: growth}", budget, *lengths]


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


def measure(side: Side, shares: Sequence[float], total: float, out: Path) -> dict[str, Any]:
    """Build the figures of one sweep: its front at shares of what it spent, with fresh seeds."""
    spent, goals = side.list_spent(count_completions)[-1], side.spec.list_objectives()
    volumes: list[float] = []
    for share in shares:
        front = side.choose_front(share * spent)
        fresh = evaluate_fresh(side, front, out)
        points = [[fresh[c.first][goal.name] for goal in goals] for c in front]
        volumes.append(round(compute_hypervolume(points, goals), 4))
    roles = [record.role for record in side.ended]
    return {
        "shares": [round(share * spent / total, 3) for share in shares],
        "hypervolume": volumes,
        "trials": {role: roles.count(role) for role in sorted({*roles})},
        "training_completions": sum(r.cost.completions for r in side.ended),
        "evaluation_completions": sum(r.cost.evaluation_completions for r in side.ended),
        "cpu_seconds": round(sum(r.cost.cpu_seconds for r in side.ended), 1),
    }


def compare_sides(
    task: str, seed: int, names: Sequence[str], out: Path, *, small: bool
) -> dict[str, Any]:
    """Run the missing sweeps of one task and seed, and build their figures."""
    figures: dict[str, Any] = {"task": task, "seed": seed}
    changes, total = SMALL if small else (), 0.0
    for name in ("fixed", *names):
        limits = list_limits(name, total, small=small)
        side = run_sweep(task, seed, name, out, [*changes, *limits])
        total = total or side.list_spent(count_completions)[-1]
        figures[name] = measure(side, SHARES if name == "fixed" else (1.0,), total, out)
    return figures


def render_markdown(figures: Sequence[Mapping[str, Any]]) -> str:
    """Render a row for each sweep; `fixed` at each share of what it spent."""
    lines = [
        "| task | seed | | completions | share | hypervolume | trainings, merges, checkpoints "
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
            shares = ", ".join(f"{share:.2f}" for share in row["shares"])
            volumes = ", ".join(f"{volume:.3f}" for volume in row["hypervolume"])
            lines.append(
                f"| {figure['task']} | {figure['seed']} | {name} | {spent:,} | {shares} | {volumes}"
                f" | {counts} | {row['cpu_seconds']:,.0f} |"
            )
    return "\n".join([*lines, ""])


def summarise(figures: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the leads of each contestant over the end of `fixed`, as shares of the box."""
    result: dict[str, Any] = {"of": len(figures)}
    for name in names:
        leads = [
            (f[name]["hypervolume"][-1] - f["fixed"]["hypervolume"][-1]) / BOXES[f["task"]]
            for f in figures
        ]
        result[name] = {
            "ahead": sum(lead >= 0 for lead in leads),
            "median_lead": round(median(leads), 4),
            "leads": [round(lead, 4) for lead in leads],
        }
    return result


def compare(
    tasks: Sequence[str], seeds: Sequence[int], names: Sequence[str], out: Path, *, small: bool
) -> None:
    """Run the missing sweeps, write the report and print the figures."""
    out.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    for seed, task in product(seeds, tasks):
        figures.append(compare_sides(task, seed, names, out, small=small))
        (out / "table.md").write_text(render_markdown(figures), encoding="utf-8")
    write_fronts_picture(figures, ["fixed", *names], out / "fronts.png")
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
    others = [name for name in CONTESTANTS if name != "fixed"]
    parser.add_argument("--rows", nargs="+", default=others, choices=others)
    parser.add_argument("--out", type=Path, default=Path("runs/search/fronts"))
    parser.add_argument("--small", action="store_true", help="one task and seed, short trials")
    options = parser.parse_args()
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            compare(["code"], [0], ["auto"], Path(directory), small=True)
        return
    compare(options.tasks, options.seeds, options.rows, options.out.absolute(), small=False)


COLORS = [mark.color for mark in style.MODES.values()]


def write_fronts_picture(
    figures: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path
) -> None:
    """Draw the hypervolume of each contestant against what it spent; write it atomically.

    The rows of `auto` with different budgets are points of one line.
    """
    tasks = list(dict.fromkeys(figure["task"] for figure in figures))
    figure = Figure(figsize=(len(tasks) * 1.1 * SIDE, SIDE + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    lines = {name: [name] for name in names if name != "third"}
    if "auto" in lines and "third" in names:
        lines["auto"] = ["third", "auto"]
    for axis, task in zip(axes, tasks, strict=True):
        for (name, rows), color in zip(lines.items(), COLORS, strict=False):
            of_task = [f for f in figures if f["task"] == task and {*rows} <= f.keys()]
            if not of_task:
                continue
            shares, volumes = (
                np.array([[x for row in rows for x in f[row][key]] for f in of_task])
                for key in ("shares", "hypervolume")
            )
            axis.plot(shares.T, volumes.T, color=color, linewidth=0.7, marker=".", alpha=0.45)
            middle = np.median(shares, axis=0), np.median(volumes, axis=0)
            axis.plot(*middle, color=color, linewidth=2, marker="o", label=name)
        axis.set_title(task, size=10, color=style.INK)
        style_axis(axis, "completions, as a share of what `fixed` spends", "hypervolume")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=FONT_SIZE
    )
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())


@dataclass(frozen=True)
class SweepLine:
    """Line of a sweep in one panel of the PNG."""

    problem: str
    contestant: str
    steps: Sequence[tuple[float, float]]


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
