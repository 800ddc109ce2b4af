"""Real sweeps of the embedded code task with stopping by dominance (ASHA) and without (FIFO).

    python benchmarks/search/sweeps.py [--seeds 3] [--out DIRECTORY] [--small]

For each seed the benchmark runs two sweeps of `search_spaces/code.yaml` with the ordinary command,
one after another on two slots: FIFO with the file's own number of trials, and ASHA with `TRIALS`
configurations until it has sampled `MARGIN` times as many completions. Both have no replicates; all
else is as in the file.

The sweeps are compared at equal CPU time, that of FIFO's search trials for training and evaluation,
and at equal completions, those that these trials sampled in training. The first also counts ASHA's
measurements at rungs; the second does not depend on the speed of the machine. Trials count when
they end: a stopped trial adds its cost, and a complete trial also its test values to the
hypervolume. Baselines do not count.

DIRECTORY keeps the sweeps, so that the same command resumes. It also gets `table.md` and
`sweeps.png` over completions, a panel for each seed and one of their median. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any

from comparison import write_picture
from fronts import SweepLine, list_overrides, run_sweep_command
from simulator import evaluate_at_budgets, find_budget_to_reach

from gdpo_tune.analysis.pareto import compute_hypervolume
from gdpo_tune.core.trials import Cost, Objective, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "code.yaml"
SLOTS = 2
TRIALS = 39
"""Configurations of ASHA: more than its budget allows, with the same start-up as FIFO."""
MARGIN = 1.1
"""Factor of FIFO's completions; ASHA also spends CPU time at rungs, so this is enough."""
SMALL = (
    "search.trials=2",
    "training.steps=3",
    "training.validation_prompts=8",
    "training.test_prompts=8",
)
NOTHING = "\N{EM DASH}"


CURRENCIES: Mapping[str, Callable[[Cost], float]] = {
    "cpu_seconds": lambda cost: cost.cpu_seconds,
    "completions": lambda cost: cost.completions,
}


@dataclass(frozen=True)
class Course:
    """Progress of the search trials of a sweep in one currency."""

    ends: Sequence[tuple[float, str]]
    """Cost spent by the end of each trial, and its state."""
    steps: Sequence[tuple[float, float]]
    """Cost spent, and the hypervolume from then on, for each rise."""

    @property
    def spent(self) -> float:
        """Cost of all search trials."""
        return self.ends[-1][0]

    def count_within(self, budget: float) -> dict[str, int]:
        """Count the trials that ended within a budget, and the complete ones among them."""
        states = [state for spent, state in self.ends if spent <= budget]
        return {"ended": len(states), "complete": states.count("complete")}

    def get_hypervolume(self, budget: float) -> float:
        return float(evaluate_at_budgets(self.steps, [budget])[0])


@dataclass(frozen=True)
class Sweep:
    """Result of one sweep."""

    seed: int
    scheduler: str
    sampler: str
    slots: int
    courses: Mapping[str, Course]
    """Course in each of `CURRENCIES`."""
    completions: int
    """Completions sampled in training by all trials, including baselines."""


def run_sweep(scheduler: str, seed: int, out: Path, changes: Sequence[str]) -> Sweep:
    """Run or resume a sweep by the command, and read its result."""
    name = f"{scheduler}-{seed}"
    own = [f"search.scheduler={{type: {scheduler}}}", *changes]
    overrides = list_overrides(seed, out, own)
    run_sweep_command(SPACE, name, overrides, out)
    spec = load_spec(SPACE, overrides, name)
    with Ledger.open(spec, read_only=True) as ledger:
        return read_sweep(spec, ledger.get_records(), ledger.get_sessions()[-1])


def read_sweep(spec: SweepSpec, records: Sequence[TrialRecord], session: dict[str, Any]) -> Sweep:
    trials = [r for r in records if r.role == "search" and r.finished is not None]
    trials.sort(key=lambda record: (record.finished or 0.0, record.number))
    return Sweep(
        seed=spec.search.seed,
        scheduler=spec.search.scheduler.type,
        sampler=session["sampler"].split()[0],
        slots=session["slots"],
        courses={
            name: build_course(trials, price, spec.list_objectives())
            for name, price in CURRENCIES.items()
        },
        completions=sum(record.cost.completions for record in records),
    )


def build_course(
    trials: Sequence[TrialRecord], price: Callable[[Cost], float], goals: Sequence[Objective]
) -> Course:
    spent = list(accumulate(price(record.cost) for record in trials))
    ends = [(by_then, record.state) for by_then, record in zip(spent, trials, strict=True)]
    return Course(ends, list_rises(trials, spent, goals))


def list_rises(
    records: Sequence[TrialRecord], spent: Sequence[float], goals: Sequence[Objective]
) -> list[tuple[float, float]]:
    """Return the cost spent and the hypervolume on test prompts at each rise."""
    points: list[list[float]] = []
    steps: list[tuple[float, float]] = []
    for record, by_then in zip(records, spent, strict=True):
        if record.state != "complete" or record.feasible is False:
            continue
        points.append([record.test[goal.name].mean for goal in goals])
        volume = compute_hypervolume(points, goals)
        if volume > (steps[-1][1] if steps else 0.0):
            steps.append((by_then, volume))
    return steps


def run_pair(seed: int, out: Path, changes: Sequence[str]) -> tuple[Sweep, Sweep]:
    """Run FIFO, then ASHA with as much to spend."""
    fifo = run_sweep("fifo", seed, out, changes)
    enough = math.ceil(MARGIN * fifo.completions)
    more = [f"search.trials={TRIALS}", f"search.budget.completions={enough}"]
    return fifo, run_sweep("asha", seed, out, [*changes, *more])


def build_figures(fifo: Sweep, asha: Sweep) -> dict[str, Any]:
    return {
        "seed": fifo.seed,
        "sampler": fifo.sampler,
        **{
            name: compare_courses({s.scheduler: s.courses[name] for s in (fifo, asha)})
            for name in CURRENCIES
        },
    }


def compare_courses(courses: Mapping[str, Course]) -> dict[str, Any]:
    """Compare both sides at FIFO's budget in one currency."""
    fifo = courses["fifo"]
    budget = fifo.spent
    return {
        "budget": round(budget, 1),
        **{
            scheduler: {
                "spent": round(course.spent, 1),
                **course.count_within(budget),
                "hypervolume_at_third": round(course.get_hypervolume(budget / 3), 4),
                "hypervolume": round(course.get_hypervolume(budget), 4),
                "reaches_fifo_at": compute_share(
                    find_budget_to_reach([course.steps], fifo.get_hypervolume(budget), budget),
                    budget,
                ),
            }
            for scheduler, course in courses.items()
        },
    }


def compute_share(spent: float | None, budget: float) -> float | None:
    """Compute the share of a budget; None for None."""
    return None if spent is None else round(spent / budget, 3)


def render_markdown(figures: Sequence[dict[str, Any]]) -> str:
    """Render a row for each sweep and currency."""
    lines = [
        "| seed | at equal | | hypervolume | at a third | trials: complete of ended | spent | "
        "reaches FIFO's end at |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed, name, scheduler in product(figures, CURRENCIES, ("fifo", "asha")):
        row = seed[name][scheduler]
        reaches = row["reaches_fifo_at"]
        cells = [
            f"{seed['seed']}",
            name.replace("_", " "),
            scheduler,
            f"{row['hypervolume']:.3f}",
            f"{row['hypervolume_at_third']:.3f}",
            f"{row['complete']} of {row['ended']}",
            f"{row['spent']:,.0f}",
            NOTHING if reaches is None else f"{reaches:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def compute_medians(figures: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compute medians over seeds, of both sides in each currency."""
    return {
        f"{scheduler}_{figure}_at_equal_{name}": round(
            median(seed[name][scheduler][figure] for seed in figures), 4
        )
        for name, scheduler, figure in product(
            CURRENCIES, ("fifo", "asha"), ("hypervolume", "hypervolume_at_third")
        )
    }


def build_panels(pairs: Sequence[tuple[Sweep, Sweep]]) -> list[SweepLine]:
    """Build a panel for each seed, and one of all seeds, over completions."""
    every = [s for pair in pairs for s in pair]
    return [
        SweepLine(panel, f"gdpo_tune {s.scheduler}", s.courses["completions"].steps)
        for panels in ([f"seed {s.seed}" for s in every], ["all seeds"] * len(every))
        for panel, s in zip(panels, every, strict=True)
    ]


def compare(seeds: int, out: Path, changes: Sequence[str]) -> None:
    """Run the missing sweeps, write the report and print the figures."""
    out.mkdir(parents=True, exist_ok=True)
    pairs = [run_pair(seed, out, changes) for seed in range(seeds)]
    figures = [build_figures(*pair) for pair in pairs]
    table = render_markdown(figures)
    (out / "table.md").write_text(table, encoding="utf-8")
    budget = median(fifo.courses["completions"].spent for fifo, _ in pairs)
    write_picture(
        build_panels(pairs), budget, out / "sweeps.png", "completions sampled in training"
    )
    print(table)
    result = {
        "benchmark": "search/sweeps",
        "seeds": seeds,
        "slots": sorted({s.slots for pair in pairs for s in pair}),
        "median": compute_medians(figures),
        "figures": figures,
    }
    print(json.dumps(result))


def main() -> None:
    """Compare sweeps as the options say; a small run leaves no files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/search/sweeps"))
    parser.add_argument("--small", action="store_true", help="one seed, short trials")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # a sweep has as many slots as cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:SLOTS])
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            compare(1, Path(directory), SMALL)
        return
    compare(options.seeds, options.out.absolute(), ())


if __name__ == "__main__":
    main()
