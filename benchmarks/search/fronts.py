"""Fronts of real sweeps for equal completions: the default against plain TPE.

    python benchmarks/search/fronts.py [--tasks code math tools] [--seeds 3] [--out DIRECTORY]

For each task and seed two sweeps of `search_spaces/<task>.yaml` run with the ordinary command, one
trial at a time: the default, with merges and checkpoints as candidates, and TPE with one point a
training, of which none is stopped. Neither has replicates. All completions count, those of
evaluations included; the published baseline counts on both sides, the untrained policy on neither.

The budget is what TPE has spent at its end. The default may spend `IN_TRAINING` of it in training;
evaluations take the rest. Both sides are compared when shares of the budget are spent; trials that
end later do not count. At each share the front is chosen by the sweep's own test
values. Then the policies on it are evaluated on the test prompts with fresh seeds, and the
hypervolume is that of the new values: so no side gains by luck. In the row `default, ends only` no
merge and no checkpoint counts, although all are paid for.

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
SHARES = (1 / 3, 2 / 3, 1.0)
"""Shares of TPE's budget at which the fronts are compared."""
FRESH_SEEDS = (1_000_001, 1_000_002)
"""Seeds of the evaluations that are compared; no trial has them."""
CONTESTANTS: Mapping[str, Sequence[str]] = {
    "default": (),
    "tpe": (
        "search.sampler=tpe",
        "search.scheduler={type: fifo}",
        "search.merges.budget=0",
        "search.checkpoints.budget=0",
    ),
}
"""Contestant -> its changes of the file."""
IN_TRAINING = 0.65
"""Share of the budget after which the default starts no further training."""
ENDS_ONLY = "default, ends only"
ROWS = ("default", ENDS_ONLY, "tpe")
SMALL = (
    "search.trials=3",
    "training={steps: 4, evaluate_every: 2, checkpoint_every: 2}",
    "training={validation_prompts: 8, test_prompts: 8}",
)


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

    def choose_front(self, budget: float, *, ends_only: bool = False) -> list[Configuration]:
        """Return the front of the trials that ended within a budget, in completions."""
        spent = self.list_spent(count_completions)
        within = [r for r, by_then in zip(self.ended, spent, strict=True) if by_then <= budget]
        counted = [record for record in within if record.is_training or not ends_only]
        pooled = pool_trials(counted, self.spec.list_objectives())
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


def limit_training(tpe: Side) -> str:
    """Return the setting that ends the default's trainings about when TPE's budget is spent."""
    budget = tpe.list_spent(count_completions)[-1]
    return f"search.budget.completions={int(IN_TRAINING * budget)}"


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
    from gdpo_tune.training.rollout import choose_held_out_sampler
    from gdpo_tune.training.trial import load_merge
    from gdpo_tune.training.worker_cache import open_worker_cache

    assert record.checkpoint is not None, "the sweep keeps all policies"
    results: list[dict[str, float]] = []
    for seed in FRESH_SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            params = record.params or spec.space.complete_baseline({})
            plain = spec.build_trial_config(params, seed, Path(directory))
            config = replace(plain, train=False)
            with open_worker_cache(config) as cache:
                evaluator = Evaluator(config, cache, choose_held_out_sampler(config))
                found = evaluator.evaluate_test(load_merge(config, record.checkpoint), 0)
        results.append({name: found[name].mean for name in spec.objectives})
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def compare_pair(default: Side, tpe: Side, out: Path) -> dict[str, Any]:
    """Build the figures of one task and seed."""
    budget = tpe.list_spent(count_completions)[-1]
    rows = {"default": (default, False), ENDS_ONLY: (default, True), "tpe": (tpe, False)}
    figures: dict[str, Any] = {"task": tpe.task, "seed": tpe.seed, "budget": budget}
    for name, (side, ends_only) in rows.items():
        volumes: list[float] = []
        for share in SHARES:
            front = side.choose_front(share * budget, ends_only=ends_only)
            fresh = evaluate_fresh(side, front, out)
            goals = side.spec.list_objectives()
            points = [[fresh[c.first][goal.name] for goal in goals] for c in front]
            volumes.append(round(compute_hypervolume(points, goals), 4))
        figures[name] = {"hypervolume": volumes, **describe_costs(side, budget)}
    figures["reaches tpe at a third"] = bool(
        figures["default"]["hypervolume"][0] >= figures["tpe"]["hypervolume"][-1]
    )
    return figures


def describe_costs(side: Side, budget: float) -> dict[str, Any]:
    """Return how often trials of each role ended within the budget, and what they cost."""
    spent = side.list_spent(count_completions)
    within = [r for r, by_then in zip(side.ended, spent, strict=True) if by_then <= budget]
    return {
        "trials": {role: sum(r.role == role for r in within) for role in {r.role for r in within}},
        "training_completions": sum(r.cost.completions for r in within),
        "evaluation_completions": sum(r.cost.evaluation_completions for r in within),
        "cpu_seconds": round(sum(r.cost.cpu_seconds for r in within), 1),
    }


def render_markdown(figures: Sequence[Mapping[str, Any]]) -> str:
    """Render a row for each sweep."""
    shares = " | ".join(f"at {share:.2f}" for share in SHARES)
    lines = [
        f"| task | seed | | {shares} | trainings, merges, checkpoints | CPU s |",
        "|---|---|---|" + "---|" * (len(SHARES) + 2),
    ]
    for figure, name in product(figures, ROWS):
        row = figure[name]
        volumes = " | ".join(f"{volume:.3f}" for volume in row["hypervolume"])
        trials = row["trials"]
        trained = sum(n for role, n in trials.items() if role not in ("merge", "checkpoint"))
        counts = f"{trained}, {trials.get('merge', 0)}, {trials.get('checkpoint', 0)}"
        lines.append(
            f"| {figure['task']} | {figure['seed']} | {name} | {volumes} | {counts} | "
            f"{row['cpu_seconds']:,.0f} |"
        )
    return "\n".join([*lines, ""])


def summarise(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how often the goals are reached, and the median lead at the whole budget."""
    leads = [f["default"]["hypervolume"][-1] - f["tpe"]["hypervolume"][-1] for f in figures]
    return {
        "reaches_tpe_at_a_third": sum(f["reaches tpe at a third"] for f in figures),
        "of": len(figures),
        "median_lead": round(median(leads), 4),
        "leads": [round(lead, 4) for lead in leads],
    }


def compare(tasks: Sequence[str], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> None:
    """Run the missing sweeps, write the report and print the figures."""
    out.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = []
    for seed, task in product(seeds, tasks):
        tpe = run_sweep(task, seed, "tpe", out, changes)
        default = run_sweep(task, seed, "default", out, [*changes, limit_training(tpe)])
        figures.append(compare_pair(default, tpe, out))
        (out / "table.md").write_text(render_markdown(figures), encoding="utf-8")
    write_fronts_picture(figures, ROWS, SHARES, out / "fronts.png")
    print(render_markdown(figures))
    print(json.dumps({"benchmark": "search/fronts", **summarise(figures), "figures": figures}))


def main() -> None:
    """Compare sweeps as the options say; a small run leaves no files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["code", "math", "tools"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/search/fronts"))
    parser.add_argument("--small", action="store_true", help="one task and seed, short trials")
    options = parser.parse_args()
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            compare(options.tasks[:1], options.seeds[:1], Path(directory), SMALL)
        return
    compare(options.tasks, options.seeds, options.out.absolute(), ())


COLORS = [mark.color for mark in style.MODES.values()]


def write_fronts_picture(
    figures: Sequence[Mapping[str, Any]], names: Sequence[str], shares: Sequence[float], path: Path
) -> None:
    """Draw the hypervolume of each contestant at each share of the budget; write it atomically.

    A dotted line marks where the last contestant ends, in the median over seeds.
    """
    tasks = list(dict.fromkeys(figure["task"] for figure in figures))
    figure = Figure(figsize=(len(tasks) * 1.1 * SIDE, SIDE + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        for name, color in zip(names, COLORS, strict=False):
            volumes = np.array([f[name]["hypervolume"] for f in figures if f["task"] == task])
            axis.plot(shares, volumes.T, color=color, linewidth=0.7, alpha=0.45)
            middle = np.median(volumes, axis=0)
            axis.plot(shares, middle, color=color, linewidth=2, marker="o", label=name)
            if name == names[-1]:
                axis.axhline(middle[-1], color=color, linewidth=1, linestyle=":")
        axis.set_title(task, size=10, color=style.INK)
        axis.set_xticks(shares, [f"{share:.2f}" for share in shares])
        style_axis(axis, "share of the budget", "hypervolume, fresh test seeds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=FONT_SIZE
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
