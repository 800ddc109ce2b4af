"""Comparison of contestants on problems over many seeds, at equal budget and concurrency."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from problems import Problem
from simulator import (
    compute_median,
    evaluate_at_budgets,
    find_budget_to_reach,
    simulate,
    trace_hypervolume,
)
from tuners import CONTESTANTS, PROBLEMS, Product, find_missing_package

sys.path.append(str(Path(__file__).resolve().parents[1]))
from jobs import Job, Result, finish


@dataclass(frozen=True)
class Plan:
    """Problems, contestants and size of a comparison."""

    name: str
    problems: Sequence[str]
    contestants: Sequence[str]
    budget: int
    """Budget in full trials."""
    seeds: int
    workers: int = 4
    """Trials in flight."""

    def list_jobs(self) -> list[dict[str, Any]]:
        """List a job for each sweep, seeds outermost, so that partial results are balanced."""
        sizes = {"budget": self.budget, "workers": self.workers}
        return [
            {"problem": problem, "contestant": contestant, "seed": seed, **sizes}
            for seed in range(self.seeds)
            for problem in self.problems
            for contestant in self.contestants
            if seed < (CONTESTANTS[contestant].most_seeds or self.seeds)
        ]

    def drop_missing(self) -> tuple[Plan, dict[str, str]]:
        """Return the plan without entries that lack a package, and these packages."""
        names = (*self.problems, *self.contestants)
        lacking = {name: package for name in names if (package := find_missing_package(name))}
        problems = [name for name in self.problems if name not in lacking]
        contestants = [name for name in self.contestants if name not in lacking]
        return replace(self, problems=problems, contestants=contestants), lacking


@lru_cache(maxsize=1)
def load_problem(name: str) -> Problem:
    """Load a problem; the cache keeps it for the next job, because some are slow to build."""
    return PROBLEMS[name]()


def run_job(job: Job) -> dict[str, Any]:
    """Run one sweep; its figures are JSON values.

    `steps` are full trials spent and the hypervolume from then on, for each change. `model_share`
    is the share of the proposals that a model made, None for a peer.
    """
    problem, seed = load_problem(job["problem"]), job["seed"]
    full = problem.full_cost
    with warnings.catch_warnings():
        # Peers warn of experimental features and of matrices, which does not affect the figures.
        warnings.simplefilter("ignore")
        tuner = CONTESTANTS[job["contestant"]].build(problem, job["budget"], seed)
        history = simulate(tuner, problem, job["workers"], seed, job["budget"] * full)
    return {
        "steps": [(spent / full, volume) for spent, volume in trace_hypervolume(history, problem)],
        "started": len(history.params),
        "complete": len(history.list_completed()),
        "model_share": tuner.compute_model_share() if isinstance(tuner, Product) else None,
        "slowest_ask": max(history.asks),
        "usual_ask": median(history.asks),
    }


def parse_arguments(description: str, full: Plan, small: Plan) -> argparse.Namespace:
    """Parse the command line that the scripts share; `plan` of the result is the comparison."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, metavar="PROBLEM")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, metavar="CONTESTANT")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--budget", type=int, help="in full trials")
    parser.add_argument("--in-flight", type=int, dest="workers", help="trials side by side")
    parser.add_argument("--processes", type=int, default=1, help="sweeps simulated side by side")
    parser.add_argument("--out", type=Path, default=Path("runs/search") / full.name)
    parser.add_argument("--small", action="store_true", help="seconds: shows that it runs")
    options = parser.parse_args()
    plan = small if options.small else full
    fields = ("problems", "contestants", "seeds", "budget", "workers")
    overrides = {name: value for name in fields if (value := getattr(options, name)) is not None}
    options.plan = replace(plan, **overrides)
    return options


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate the missing sweeps, report, and return the figures; a small run leaves no files."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) if options.small else options.out
        return _compare(options.plan, options.processes, out)


def _compare(requested: Plan, processes: int, out: Path) -> dict[str, Any]:
    plan, lacking = requested.drop_missing()
    for name, package in lacking.items():
        print(f"left out: {name}, which needs {package} (pip install -e '.[bench]')")
    jobs = plan.list_jobs()
    results = finish(jobs, run_job, out / "sweeps.jsonl", processes)
    rows = build_rows(jobs, results, plan.budget)
    table = render_markdown(rows, plan.budget)
    (out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    return {
        "benchmark": f"search/{plan.name}",
        "budget": plan.budget,
        "in_flight": plan.workers,
        "seeds": plan.seeds,
        "left_out": lacking,
        "figures": [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in rows
        ],
    }


@dataclass(frozen=True)
class Row:
    """Figures of one contestant on one problem, over its seeds; medians of the hypervolume."""

    problem: str
    contestant: str
    seeds: int
    median: float
    low: float
    high: float
    mean: float
    deviation: float
    at_third: float
    at_half: float
    to_reach: float | None
    """Share of the budget at which the median reaches the final ones of all `TO_REACH`.

    None if it never does, or for a contestant of `TO_REACH`."""
    started: float
    complete: float
    model_share: float | None
    usual_ask: float
    slowest_ask: float


TO_REACH = ("optuna random", "optuna tpe")
"""Contestants whose final hypervolume the others should reach with less budget."""


def build_rows(jobs: Sequence[Job], results: Sequence[Result], budget: int) -> list[Row]:
    """Build a row for each problem and contestant, problem by problem."""
    groups: dict[str, dict[str, list[Result]]] = {}
    for job, result in zip(jobs, results, strict=True):
        of_problem = groups.setdefault(job["problem"], {})
        of_problem.setdefault(job["contestant"], []).append(result)
    rows: list[Row] = []
    for problem, contestants in groups.items():
        finals = [
            median(evaluate_at_budgets(sweep["steps"], [budget])[0] for sweep in contestants[name])
            for name in TO_REACH
            if name in contestants
        ]
        for name, sweeps in contestants.items():
            goal = None if name in TO_REACH else max(finals, default=None)
            rows.append(_build_row(problem, name, sweeps, budget, goal))
    return rows


def _build_row(
    problem: str, contestant: str, sweeps: Sequence[Result], budget: int, goal: float | None
) -> Row:
    steps = [sweep["steps"] for sweep in sweeps]
    values = np.array([evaluate_at_budgets(one, [budget / 3, budget / 2, budget]) for one in steps])
    middle, low, high = compute_median(values)
    enough = None if goal is None else find_budget_to_reach(steps, goal, budget)
    shares = [sweep["model_share"] for sweep in sweeps if sweep["model_share"] is not None]
    return Row(
        problem=problem,
        contestant=contestant,
        seeds=len(sweeps),
        median=float(middle[2]),
        low=float(low[2]),
        high=float(high[2]),
        mean=float(values[:, 2].mean()),
        deviation=float(values[:, 2].std(ddof=1)) if len(sweeps) > 1 else 0.0,
        at_third=float(middle[0]),
        at_half=float(middle[1]),
        to_reach=None if enough is None else enough / budget,
        started=float(np.mean([sweep["started"] for sweep in sweeps])),
        complete=float(np.mean([sweep["complete"] for sweep in sweeps])),
        model_share=float(np.mean(shares)) if shares else None,
        usual_ask=float(np.median([sweep["usual_ask"] for sweep in sweeps])),
        slowest_ask=max(sweep["slowest_ask"] for sweep in sweeps),
    )


def render_markdown(rows: Sequence[Row], budget: int) -> str:
    """Render a table for each problem."""
    lines: list[str] = []
    for problem in dict.fromkeys(row.problem for row in rows):
        lines += [
            f"### {problem}, budget of {budget} full trials",
            "",
            "| | hypervolume, median [95 %] | mean ± sd | at a third | at half | "
            "reaches random and TPE at | trials: complete of started | from the model | "
            "ask: median, slowest (s) | seeds |",
            "|---" * 10 + "|",
        ]
        for row in (row for row in rows if row.problem == problem):
            reach, model = (
                "\N{EM DASH}" if share is None else f"{share:.2f}"
                for share in (row.to_reach, row.model_share)
            )
            lines.append(
                f"| {row.contestant} | {row.median:.3f} [{row.low:.3f}, {row.high:.3f}] "
                f"| {row.mean:.3f} ± {row.deviation:.3f} | {row.at_third:.3f} | {row.at_half:.3f} "
                f"| {reach} | {row.complete:.0f} of {row.started:.0f} | {model} "
                f"| {row.usual_ask:.3f}, {row.slowest_ask:.2f} | {row.seeds} |"
            )
        lines.append("")
    return "\n".join(lines)
