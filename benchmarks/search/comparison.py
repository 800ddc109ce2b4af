"""Comparison of contestants on problems over many seeds, at equal budget and concurrency."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from contestants import CONTESTANTS, PROBLEMS, find_missing_package
from kept import finish
from measures import Share, count_continuations, trace_hypervolume
from problems import Problem, compute_full_cost
from product import Product
from simulator import Simulation, find_completed


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
        return [
            {
                "problem": problem,
                "contestant": contestant,
                "seed": seed,
                "budget": self.budget,
                "workers": self.workers,
            }
            for seed in range(self.seeds)
            for problem in self.problems
            for contestant in self.contestants
            if seed < (CONTESTANTS[contestant].most_seeds or self.seeds)
        ]

    def drop_missing(self) -> tuple[Plan, dict[str, str]]:
        """Return the plan without entries that lack a package, and these packages."""
        names = (*self.problems, *self.contestants)
        lacking = {name: package for name in names if (package := find_missing_package(name))}
        return (
            replace(
                self,
                problems=[name for name in self.problems if name not in lacking],
                contestants=[name for name in self.contestants if name not in lacking],
            ),
            lacking,
        )


@dataclass(frozen=True)
class Sweep:
    """Result of one simulated sweep."""

    problem: str
    contestant: str
    seed: int
    steps: Sequence[tuple[float, float]]
    """Full trials spent, and the hypervolume from then on, for each change."""
    started: int
    complete: int
    model_share: float | None
    """Share of the proposals that a model made; None for a peer."""
    continued: Mapping[str, Share]
    slowest_ask: float
    """Real seconds of the slowest proposal."""
    usual_ask: float


@lru_cache(maxsize=1)
def load_problem(name: str) -> Problem:
    """Load a problem; the cache keeps it for the next job, because some are slow to build."""
    return PROBLEMS[name]()


def simulate(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one sweep; return the fields of a `Sweep` as JSON values."""
    problem = load_problem(job["problem"])
    full = compute_full_cost(problem)
    with warnings.catch_warnings():
        # Peers warn of experimental features and of matrices, which does not affect the figures.
        warnings.simplefilter("ignore")
        tuner = CONTESTANTS[job["contestant"]].build(problem, job["budget"], job["seed"])
        history = Simulation(tuner, problem, job["workers"], job["seed"]).run(job["budget"] * full)
    shares = count_continuations(history, problem)
    return {
        "steps": [(spent / full, volume) for spent, volume in trace_hypervolume(history, problem)],
        "started": len(history.params),
        "complete": len(find_completed(history)),
        "model_share": tuner.compute_model_share() if isinstance(tuner, Product) else None,
        "continued": {name: (share.hits, share.of) for name, share in shares.items()},
        "slowest_ask": max(history.asks),
        "usual_ask": median(history.asks),
    }


def read_sweep(job: Mapping[str, Any], result: Mapping[str, Any]) -> Sweep:
    """Build a `Sweep` from a job and its result."""
    fields = {name: job[name] for name in ("problem", "contestant", "seed")}
    continued = {name: Share(*counts) for name, counts in result["continued"].items()}
    steps = [(spent, volume) for spent, volume in result["steps"]]
    return Sweep(**{**result, **fields, "continued": continued, "steps": steps})


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


def compare(options: argparse.Namespace) -> tuple[list[Sweep], dict[str, Any]]:
    """Simulate the missing sweeps and report; a small run leaves no files.

    Returns:
        All sweeps, and the figures for the line of JSON.
    """
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            return _compare(options.plan, options.processes, Path(directory))
    return _compare(options.plan, options.processes, options.out)


def _compare(requested: Plan, processes: int, out: Path) -> tuple[list[Sweep], dict[str, Any]]:
    from picture import write_picture
    from report import build_figures, render_markdown

    plan, lacking = requested.drop_missing()
    for name, package in lacking.items():
        print(f"left out: {name}, which needs {package} (pip install -e '.[bench]')")
    jobs = plan.list_jobs()
    results = finish(jobs, simulate, out / "sweeps.jsonl", processes)
    sweeps = [read_sweep(job, result) for job, result in zip(jobs, results, strict=True)]
    table = render_markdown(sweeps, plan.budget)
    (out / "table.md").write_text(table, encoding="utf-8")
    write_picture(sweeps, plan.budget, out / f"{plan.name}.png")
    print(table)
    return sweeps, {
        "benchmark": f"search/{plan.name}",
        "budget": plan.budget,
        "in_flight": plan.workers,
        "seeds": plan.seeds,
        "left_out": lacking,
        "figures": build_figures(sweeps, plan.budget),
    }


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the line of JSON that ends a script."""
    print(json.dumps(figures))
