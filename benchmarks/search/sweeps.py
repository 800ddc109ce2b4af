"""Real sweeps: the embedded code task, stopped by dominance (ASHA) and not at all (FIFO).

    python benchmarks/search/sweeps.py [--seeds 3] [--out DIRECTORY] [--small]

For each seed two sweeps of `search_spaces/code.yaml`, by the command that users type, one after
another on two slots: FIFO with the file's own number of trials, and ASHA with `TRIALS`
configurations to try until it has sampled `MARGIN` as many completions. Both leave replicates out;
all else is what the file ships.

What is equal is, once, CPU time: that of FIFO's search trials, training and evaluation; and once
the completions that they sampled in training. The first counts what ASHA measures at rungs as well,
the second stays true where the machine is faster at one hour than at another. Trials count as they
end: what a stopped one cost is spent as well, what a complete one is worth on test prompts enters
the hypervolume. Baselines are neither paid for nor counted.

DIRECTORY keeps the sweeps: the same command goes on where it was ended. It also gets `table.md` and
`sweeps.png` over completions, a panel a seed and one of their median. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any

from measures import evaluate_at_budgets, find_budget_to_reach
from picture import write_picture

from gdpo_tune.analysis.pareto import compute_hypervolume
from gdpo_tune.core.trials import Cost, Objective, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "code.yaml"
SLOTS = 2
TRIALS = 39
"""Configurations that ASHA may try: more than its budget allows, and the same start-up as FIFO."""
MARGIN = 1.1
"""Of FIFO's completions: what ASHA measures at rungs costs CPU time too, so that is enough."""
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
    """What the search trials of a sweep had come to by when, in one currency."""

    ends: Sequence[tuple[float, str]]
    """Spent by the end of each trial, and its state."""
    steps: Sequence[tuple[float, float]]
    """Spent, and the hypervolume from then on, once for each time it rose."""

    @property
    def spent(self) -> float:
        """By all search trials."""
        return self.ends[-1][0]

    def count_within(self, budget: float) -> dict[str, int]:
        """How many trials ended within a budget, and how many of them had their full length."""
        states = [state for spent, state in self.ends if spent <= budget]
        return {"ended": len(states), "complete": states.count("complete")}

    def get_hypervolume(self, budget: float) -> float:
        """The hypervolume once so much is spent."""
        return float(evaluate_at_budgets(self.steps, [budget])[0])


@dataclass(frozen=True)
class Sweep:
    """What one sweep came to."""

    seed: int
    scheduler: str
    sampler: str
    slots: int
    courses: Mapping[str, Course]
    """For each of `CURRENCIES`."""
    completions: int
    """Sampled in training, by all trials, baselines included."""


@dataclass(frozen=True)
class Line:
    """A sweep in one panel of the picture."""

    problem: str
    contestant: str
    steps: Sequence[tuple[float, float]]


def run_sweep(scheduler: str, seed: int, out: Path, changes: Sequence[str]) -> Sweep:
    """Run or continue a sweep by the command, and read what it came to."""
    name = f"{scheduler}-{seed}"
    overrides = [
        f"search.scheduler={{type: {scheduler}}}",
        f"search.seed={seed}",
        "search.replicates.max_runs=0",
        f"storage={out}",
        f"tracking.uri=sqlite:///{out}/mlflow.db",
        *changes,
    ]
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(SPACE), "--name", name, *words]
    print(f"{name}: its output goes to {out / name}.log", flush=True)
    with (out / f"{name}.log").open("a", encoding="utf-8") as log:
        status = subprocess.run(command, check=False, stdout=log, stderr=log).returncode
    if status:
        raise SystemExit(
            f"{name} ended with status {status}; once mended, the same command goes on"
        )
    spec = load_spec(SPACE, overrides, name)
    with Ledger.open(spec, read_only=True) as ledger:
        return read_sweep(spec, ledger.get_records(), ledger.get_sessions()[-1])


def read_sweep(spec: SweepSpec, records: Sequence[TrialRecord], session: dict[str, Any]) -> Sweep:
    """A finished sweep."""
    tried = [r for r in records if r.role == "search" and r.finished is not None]
    tried.sort(key=lambda record: (record.finished or 0.0, record.number))
    return Sweep(
        seed=spec.search.seed,
        scheduler=spec.search.scheduler.type,
        sampler=session["sampler"].split()[0],
        slots=session["slots"],
        courses={
            name: build_course(tried, price, spec.list_objectives())
            for name, price in CURRENCIES.items()
        },
        completions=sum(record.cost.completions for record in records),
    )


def build_course(
    tried: Sequence[TrialRecord], price: Callable[[Cost], float], goals: Sequence[Objective]
) -> Course:
    """What trials, in the order of their ends, had come to by when."""
    spent = list(accumulate(price(record.cost) for record in tried))
    ends = [(by_then, record.state) for by_then, record in zip(spent, tried, strict=True)]
    return Course(ends, list_rises(tried, spent, goals))


def list_rises(
    records: Sequence[TrialRecord], spent: Sequence[float], goals: Sequence[Objective]
) -> list[tuple[float, float]]:
    """What was spent when a complete trial raised the hypervolume on test prompts, and to what."""
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
    """FIFO, then ASHA with as much to spend."""
    fifo = run_sweep("fifo", seed, out, changes)
    enough = math.ceil(MARGIN * fifo.completions)
    more = [f"search.trials={TRIALS}", f"search.budget.completions={enough}"]
    return fifo, run_sweep("asha", seed, out, [*changes, *more])


def build_figures(fifo: Sweep, asha: Sweep) -> dict[str, Any]:
    """One seed, for JSON."""
    return {
        "seed": fifo.seed,
        "sampler": fifo.sampler,
        **{
            name: compare_courses({s.scheduler: s.courses[name] for s in (fifo, asha)})
            for name in CURRENCIES
        },
    }


def compare_courses(courses: Mapping[str, Course]) -> dict[str, Any]:
    """Both sides at FIFO's budget in one currency."""
    fifo = courses["fifo"]
    budget = fifo.spent
    return {
        "budget": round(budget, 1),
        **{
            scheduler: {
                "spent": round(found.spent, 1),
                **found.count_within(budget),
                "hypervolume_at_third": round(found.get_hypervolume(budget / 3), 4),
                "hypervolume": round(found.get_hypervolume(budget), 4),
                "reaches_fifo_at": compute_share(
                    find_budget_to_reach([found.steps], fifo.get_hypervolume(budget), budget),
                    budget,
                ),
            }
            for scheduler, found in courses.items()
        },
    }


def compute_share(spent: float | None, budget: float) -> float | None:
    """Of a budget; None for None."""
    return None if spent is None else round(spent / budget, 3)


def render_markdown(found: Sequence[dict[str, Any]]) -> str:
    """A row a sweep and currency."""
    lines = [
        "| seed | at equal | | hypervolume | at a third | trials: complete of ended | spent | "
        "reaches FIFO's end at |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed, name, scheduler in product(found, CURRENCIES, ("fifo", "asha")):
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


def compute_medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over seeds, of both sides in each currency."""
    return {
        f"{scheduler}_{figure}_at_equal_{name}": round(
            median(seed[name][scheduler][figure] for seed in found), 4
        )
        for name, scheduler, figure in product(
            CURRENCIES, ("fifo", "asha"), ("hypervolume", "hypervolume_at_third")
        )
    }


def build_panels(pairs: Sequence[tuple[Sweep, Sweep]]) -> list[Line]:
    """A panel a seed, and one of all of them, over completions."""
    every = [s for pair in pairs for s in pair]
    return [
        Line(panel, f"gdpo_tune {s.scheduler}", s.courses["completions"].steps)
        for panels in ([f"seed {s.seed}" for s in every], ["all seeds"] * len(every))
        for panel, s in zip(panels, every, strict=True)
    ]


def compare(seeds: int, out: Path, changes: Sequence[str]) -> None:
    """Run what is missing, write, print."""
    out.mkdir(parents=True, exist_ok=True)
    pairs = [run_pair(seed, out, changes) for seed in range(seeds)]
    found = [build_figures(*pair) for pair in pairs]
    table = render_markdown(found)
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
        "median": compute_medians(found),
        "figures": found,
    }
    print(json.dumps(result))


def main() -> None:
    """Compare what is asked for; a small run leaves nothing behind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/search/sweeps"))
    parser.add_argument("--small", action="store_true", help="one seed, short trials")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # as many slots as cores that the command may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:SLOTS])
    if options.small:
        with tempfile.TemporaryDirectory() as directory:
            compare(1, Path(directory), SMALL)
        return
    compare(options.seeds, options.out.absolute(), ())


if __name__ == "__main__":
    main()
