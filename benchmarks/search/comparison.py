"""Comparison of contestants on problems over many seeds, at equal budget and concurrency.

Jobs can resume after a kill: each result is on disk before the next one is awaited.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from problems import Problem, compute_full_cost
from simulator import (
    Simulation,
    compute_median,
    evaluate_at_budgets,
    find_budget_to_reach,
    find_completed,
    trace_hypervolume,
)
from tuners import CONTESTANTS, PROBLEMS, Product, find_missing_package

from gdpo_tune.core.files import write_atomically
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis


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
    return {
        "steps": [(spent / full, volume) for spent, volume in trace_hypervolume(history, problem)],
        "started": len(history.params),
        "complete": len(find_completed(history)),
        "model_share": tuner.compute_model_share() if isinstance(tuner, Product) else None,
        "slowest_ask": max(history.asks),
        "usual_ask": median(history.asks),
    }


def read_sweep(job: Mapping[str, Any], result: Mapping[str, Any]) -> Sweep:
    """Build a `Sweep` from a job and its result."""
    fields = {name: job[name] for name in ("problem", "contestant", "seed")}
    steps = [(spent, volume) for spent, volume in result["steps"]]
    return Sweep(**{**result, **fields, "steps": steps})


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


Job = Mapping[str, Any]
Result = Mapping[str, Any]


def read_done(path: Path) -> dict[str, Result]:
    """Return key of a job -> its result from a file; remove an incomplete last line."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))  # a kill while the file is rewritten would lose all of it
    entries = map(json.loads, whole.splitlines())
    return {build_key(entry["job"]): entry["result"] for entry in entries}


def finish(
    jobs: Sequence[Job], work: Callable[[Job], Result], path: Path, processes: int
) -> list[Result]:
    """Run all jobs without a result in the file; return all results in the order of the jobs.

    Args:
        jobs: mappings of JSON values.
        work: function of a module, so that another process can import it.
        path: file of the results.
        processes: number of parallel processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_done(path)
    missing = [job for job in jobs if build_key(job) not in done]
    started = time.perf_counter()
    for count, (job, result) in enumerate(_run_jobs(missing, work, processes), 1):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job, "result": result}) + "\n")
        done[build_key(job)] = result
        values = ", ".join(map(str, job.values()))
        print(
            f"{count}/{len(missing)}  {time.perf_counter() - started:.0f} s  {values}", flush=True
        )
    return [done[build_key(job)] for job in jobs]


def build_key(job: Job) -> str:
    """Build the key of a job; equal jobs have equal keys."""
    return json.dumps(job, sort_keys=True)


def _run_jobs(
    jobs: Sequence[Job], work: Callable[[Job], Result], processes: int
) -> Iterator[tuple[Job, Result]]:
    if processes == 1:
        yield from ((job, work(job)) for job in jobs)
        return
    # Spawn, because a fork would copy the locks of torch's threads.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_Work(work), jobs)


class _Work:
    """Callable that returns a job with its result, because results arrive in any order."""

    def __init__(self, work: Callable[[Job], Result]) -> None:
        self._work = work

    def __call__(self, job: Job) -> tuple[Job, Result]:
        return job, self._work(job)


NOTHING = "\N{EM DASH}"


@dataclass(frozen=True)
class Row:
    """Figures of one contestant on one problem, over its seeds."""

    problem: str
    contestant: str
    seeds: int
    median: float
    """Median hypervolume at the whole budget."""
    low: float
    high: float
    mean: float
    deviation: float
    """Standard deviation over seeds."""
    at_third: float
    """Median hypervolume at a third of the budget."""
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


def build_rows(sweeps: Sequence[Sweep], budget: int) -> Iterator[Row]:
    """Yield a row for each problem and contestant, problem by problem."""
    for problem in dict.fromkeys(sweep.problem for sweep in sweeps):
        own = [sweep for sweep in sweeps if sweep.problem == problem]
        names = list(dict.fromkeys(sweep.contestant for sweep in own))
        groups = {name: [sweep for sweep in own if sweep.contestant == name] for name in names}
        goals = [_compute_final(groups[name], budget) for name in TO_REACH if name in groups]
        for name, group in groups.items():
            yield _build_row(group, budget, None if name in TO_REACH else max(goals, default=None))


def _compute_final(sweeps: Sequence[Sweep], budget: int) -> float:
    return float(np.median([evaluate_at_budgets(sweep.steps, [budget])[0] for sweep in sweeps]))


def _build_row(sweeps: Sequence[Sweep], budget: int, goal: float | None) -> Row:
    values = np.array(
        [evaluate_at_budgets(sweep.steps, [budget / 3, budget / 2, budget]) for sweep in sweeps]
    )
    final = compute_median(values)
    enough = (
        None
        if goal is None
        else find_budget_to_reach([sweep.steps for sweep in sweeps], goal, budget)
    )
    shares = [sweep.model_share for sweep in sweeps if sweep.model_share is not None]
    return Row(
        problem=sweeps[0].problem,
        contestant=sweeps[0].contestant,
        seeds=len(sweeps),
        median=float(final.value[2]),
        low=float(final.low[2]),
        high=float(final.high[2]),
        mean=float(values[:, 2].mean()),
        deviation=float(values[:, 2].std(ddof=1)) if len(sweeps) > 1 else 0.0,
        at_third=float(final.value[0]),
        at_half=float(final.value[1]),
        to_reach=None if enough is None else enough / budget,
        started=float(np.mean([sweep.started for sweep in sweeps])),
        complete=float(np.mean([sweep.complete for sweep in sweeps])),
        model_share=float(np.mean(shares)) if shares else None,
        usual_ask=float(np.median([sweep.usual_ask for sweep in sweeps])),
        slowest_ask=max(sweep.slowest_ask for sweep in sweeps),
    )


def render_markdown(sweeps: Sequence[Sweep], budget: int) -> str:
    """Render a table for each problem."""
    rows = list(build_rows(sweeps, budget))
    tables = [
        _render_table([row for row in rows if row.problem == problem], budget)
        for problem in dict.fromkeys(row.problem for row in rows)
    ]
    return "\n".join(tables)


def build_figures(sweeps: Sequence[Sweep], budget: int) -> list[dict[str, Any]]:
    """Build the rows for JSON."""
    return [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
        for row in build_rows(sweeps, budget)
    ]


def _render_table(rows: Sequence[Row], budget: int) -> str:
    lines = [
        f"### {rows[0].problem}, budget of {budget} full trials",
        "",
        "| | hypervolume, median [95 %] | mean ± sd | at a third | at half | "
        "reaches random and TPE at | trials: complete of started | from the model | "
        "ask: median, slowest (s) | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.contestant,
            f"{row.median:.3f} [{row.low:.3f}, {row.high:.3f}]",
            f"{row.mean:.3f} ± {row.deviation:.3f}",
            f"{row.at_third:.3f}",
            f"{row.at_half:.3f}",
            _format_share(row.to_reach),
            f"{row.complete:.0f} of {row.started:.0f}",
            _format_share(row.model_share),
            f"{row.usual_ask:.3f}, {row.slowest_ask:.2f}",
            str(row.seeds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _format_share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


OURS = "gdpo_tune"
ACROSS = 3
"""Most panels side by side."""
LEGEND = 2.6
"""Width of the legend in inches."""
GRID = 181
"""Number of budgets at which a line is drawn."""
COLORS = [mark.color for mark in style.MODES.values()]
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
"""Dashes of our lines, of the peers' lines, and of peers after all colours are used."""


def write_picture(sweeps: Sequence[Sweep], budget: float, path: Path) -> None:
    """Draw all sweeps and write the file atomically."""
    problems = list(dict.fromkeys(sweep.problem for sweep in sweeps))
    names = list(dict.fromkeys(sweep.contestant for sweep in sweeps))
    columns = min(ACROSS, len(problems))
    lines = -(-len(problems) // columns)
    figure = Figure(
        figsize=(columns * 1.35 * SIDE + LEGEND, lines * SIDE + 0.4), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(problems) :]:
        axis.set_visible(False)
    for axis, problem in zip(axes, problems, strict=False):
        for name in names:
            own = [s for s in sweeps if (s.problem, s.contestant) == (problem, name)]
            if own:
                _draw(axis, own, budget, *_choose_style(name, names))
        axis.set_title(problem, size=10, color=style.INK)
        style_axis(axis, "budget spent, in full trials", "hypervolume of finished trials")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title="Median over seeds,\nand 95 % of its bootstrap",
        title_fontsize=FONT_SIZE,
        alignment="left",
        loc="outside right upper",
        frameon=False,
        fontsize=FONT_SIZE,
    )
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())


def _choose_style(name: str, names: Sequence[str]) -> tuple[str, object]:
    """Choose colour and dash: solid lines are ours, dashed ones the peers'."""
    turn, color = divmod(names.index(name), len(COLORS))
    return COLORS[color], DASHES[0 if name.startswith(OURS) else 1 + turn]


def _draw(axis: Axes, sweeps: Sequence[Sweep], budget: float, color: str, dash: object) -> None:
    budgets = np.linspace(0, budget, GRID)
    interval = compute_median(
        np.array([evaluate_at_budgets(sweep.steps, budgets) for sweep in sweeps])
    )
    axis.fill_between(budgets, interval.low, interval.high, color=color, alpha=0.12, linewidth=0)
    name = sweeps[0].contestant
    axis.plot(budgets, interval.value, color=color, linestyle=dash, linewidth=1.4, label=name)
