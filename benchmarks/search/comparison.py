"""Contestants on problems, many seeds, the same budget and concurrency: what the scripts share."""

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
from measures import Share, count_continuations, find_completed, trace_hypervolume
from problems import Problem
from product import Product
from simulator import Simulation


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    name: str
    problems: Sequence[str]
    contestants: Sequence[str]
    budget: int
    """In full trials."""
    seeds: int
    workers: int = 4
    """Trials in flight."""

    def list_jobs(self) -> list[dict[str, Any]]:
        """One for each sweep, seeds outermost, so that what is there at any time is even."""
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
        """The plan with what can take part, and what the others lack."""
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
    """What one simulated sweep came to."""

    problem: str
    contestant: str
    seed: int
    steps: Sequence[tuple[float, float]]
    """Full trials spent, and the hypervolume from then on."""
    started: int
    complete: int
    model_share: float | None
    """Of the proposals; None for a peer."""
    continued: Mapping[str, Share]
    slowest_ask: float
    """Seconds of real time."""
    usual_ask: float


@lru_cache(maxsize=1)
def load_problem(name: str) -> Problem:
    """A problem, kept from one job to the next: some take a while to make."""
    return PROBLEMS[name]()


def simulate(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one sweep; the result is what JSON can hold of a `Sweep`."""
    problem = load_problem(job["problem"])
    full = problem.levels[-1]
    with warnings.catch_warnings():
        # Peers warn of what they try out and of matrices; nothing of it changes what is compared.
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
    """A job and its result as a `Sweep`."""
    known = {name: job[name] for name in ("problem", "contestant", "seed")}
    continued = {name: Share(*counts) for name, counts in result["continued"].items()}
    steps = [(spent, volume) for spent, volume in result["steps"]]
    return Sweep(**{**result, **known, "continued": continued, "steps": steps})


def parse_arguments(description: str, full: Plan, small: Plan) -> argparse.Namespace:
    """The command line that the scripts share; its `plan` is what to compare."""
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
    given = {name: value for name in fields if (value := getattr(options, name)) is not None}
    options.plan = replace(plan, **given)
    return options


def compare(options: argparse.Namespace) -> tuple[list[Sweep], dict[str, Any]]:
    """Simulate what is not done yet and report; a small run leaves nothing behind.

    Returns:
        All sweeps, and the figures for the line of JSON.
    """
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            return _compare(options.plan, options.processes, Path(directory))
    return _compare(options.plan, options.processes, options.out)


def _compare(asked: Plan, processes: int, out: Path) -> tuple[list[Sweep], dict[str, Any]]:
    from picture import write_picture
    from report import build_figures, render_markdown

    plan, lacking = asked.drop_missing()
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
    """The last line of a script."""
    print(json.dumps(figures))
