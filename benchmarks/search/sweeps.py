"""Real sweeps: the embedded code task, stopped by dominance (ASHA) and not at all (FIFO).

    python benchmarks/search/sweeps.py [--seeds 3] [--out FOLDER] [--small]

For each seed two sweeps of `search_spaces/code.yaml`, by the command that users type, one after
another on two slots: FIFO with the file's own number of trials, and ASHA with `TRIALS`
configurations to try until it has sampled `MARGIN` as many completions. Both leave replicates out;
all else is what the file ships.

What is equal is CPU time: that of FIFO's search trials, training and evaluation, is the budget of
its seed. Trials count as they end: what a stopped one cost is spent as well, what a complete one is
worth on test prompts enters the hypervolume. Baselines are neither paid for nor counted.

FOLDER keeps the sweeps: the same command goes on where it was ended. It also gets `table.md` and
`sweeps.png`, a panel a seed and one of their median. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measures import at_budgets, reached
from picture import write_picture

from gdpo_tune.analysis.pareto import hypervolume
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.trials import Objective, TrialRecord

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


@dataclass(frozen=True)
class Sweep:
    """What one sweep came to."""

    seed: int
    scheduler: str
    sampler: str
    slots: int
    ends: Sequence[tuple[float, str]]
    """CPU seconds spent on search trials by the end of each of them, and its state."""
    steps: Sequence[tuple[float, float]]
    """CPU seconds spent, and the hypervolume from then on, once for each time it rose."""
    completions: int
    """Sampled in training, by all trials."""

    @property
    def spent(self) -> float:
        """CPU seconds of all search trials."""
        return self.ends[-1][0]

    def within(self, budget: float) -> dict[str, int]:
        """How many trials ended within so many CPU seconds, and how many had their full budget."""
        states = [state for spent, state in self.ends if spent <= budget]
        return {"ended": len(states), "complete": states.count("complete")}

    def at(self, budget: float) -> float:
        """The hypervolume at so many CPU seconds."""
        return float(at_budgets(self.steps, [budget])[0])


@dataclass(frozen=True)
class Line:
    """A sweep in one panel of the picture."""

    problem: str
    contestant: str
    steps: Sequence[tuple[float, float]]


def sweep(scheduler: str, seed: int, out: Path, changes: Sequence[str]) -> Sweep:
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
        return read(spec, ledger.records(), ledger.sessions()[-1])


def read(spec: SweepSpec, records: Sequence[TrialRecord], session: dict[str, Any]) -> Sweep:
    """A finished sweep."""
    tried = [r for r in records if r.role == "search" and r.finished is not None]
    tried.sort(key=lambda record: (record.finished or 0.0, record.number))
    spent, ends = 0.0, []
    for record in tried:
        spent += record.cost.cpu_seconds
        ends.append((spent, record.state))
    return Sweep(
        seed=spec.search.seed,
        scheduler=spec.search.scheduler.type,
        sampler=session["sampler"].split()[0],
        slots=session["slots"],
        ends=ends,
        steps=rises(tried, [spent for spent, _ in ends], spec.objective_list()),
        completions=sum(record.cost.completions for record in records),
    )


def rises(
    records: Sequence[TrialRecord], spent: Sequence[float], goals: Sequence[Objective]
) -> list[tuple[float, float]]:
    """What was spent when a complete trial raised the hypervolume on test prompts, and to what."""
    points: list[list[float]] = []
    steps: list[tuple[float, float]] = []
    for record, by_then in zip(records, spent, strict=True):
        if record.state != "complete" or record.feasible is False:
            continue
        points.append([record.test[goal.name].mean for goal in goals])
        volume = hypervolume(points, goals)
        if volume > (steps[-1][1] if steps else 0.0):
            steps.append((by_then, volume))
    return steps


def both(seed: int, out: Path, changes: Sequence[str]) -> tuple[Sweep, Sweep]:
    """FIFO, then ASHA with as much to spend."""
    fifo = sweep("fifo", seed, out, changes)
    enough = math.ceil(MARGIN * fifo.completions)
    more = [f"search.trials={TRIALS}", f"search.budget.completions={enough}"]
    return fifo, sweep("asha", seed, out, [*changes, *more])


def figures(fifo: Sweep, asha: Sweep) -> dict[str, Any]:
    """One seed, for JSON."""
    budget = fifo.spent
    enough = reached([asha.steps], fifo.at(budget), budget)
    return {
        "seed": fifo.seed,
        "budget_cpu_seconds": round(budget, 1),
        "fifo_reaches_its_end_at": round(fifo.steps[-1][0] / budget, 3) if fifo.steps else None,
        "asha_reaches_fifo_at": None if enough is None else round(enough / budget, 3),
        **{
            s.scheduler: {
                "sampler": s.sampler,
                "cpu_seconds": round(s.spent, 1),
                "completions": s.completions,
                **s.within(budget),
                "hypervolume_at_third": round(s.at(budget / 3), 4),
                "hypervolume": round(s.at(budget), 4),
            }
            for s in (fifo, asha)
        },
    }


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """A row a sweep."""
    lines = [
        "| seed | | hypervolume | at a third | trials: complete of ended | CPU s in all | "
        "reaches FIFO's end at |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed in found:
        ways = {"fifo": seed["fifo_reaches_its_end_at"], "asha": seed["asha_reaches_fifo_at"]}
        for scheduler, share in ways.items():
            row = seed[scheduler]
            cells = [
                f"{seed['seed']}",
                f"{scheduler}, {row['sampler']}",
                f"{row['hypervolume']:.3f}",
                f"{row['hypervolume_at_third']:.3f}",
                f"{row['complete']} of {row['ended']}",
                f"{row['cpu_seconds']:.0f}",
                NOTHING if share is None else f"{share:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over seeds."""
    names = ("hypervolume", "hypervolume_at_third")
    return {
        f"{scheduler}_{name}": round(median(seed[scheduler][name] for seed in found), 4)
        for scheduler in ("fifo", "asha")
        for name in names
    }


def panels(pairs: Sequence[tuple[Sweep, Sweep]]) -> list[Line]:
    """A panel a seed, and one of all of them."""
    every = [s for pair in pairs for s in pair]
    return [
        *(Line(f"seed {s.seed}", f"gdpo_tune {s.scheduler}", s.steps) for s in every),
        *(Line("all seeds", f"gdpo_tune {s.scheduler}", s.steps) for s in every),
    ]


def compare(seeds: int, out: Path, changes: Sequence[str]) -> None:
    """Run what is missing, write, print."""
    out.mkdir(parents=True, exist_ok=True)
    pairs = [both(seed, out, changes) for seed in range(seeds)]
    found = [figures(*pair) for pair in pairs]
    table = markdown(found)
    (out / "table.md").write_text(table, encoding="utf-8")
    budget = median(fifo.spent for fifo, _ in pairs)
    write_picture(panels(pairs), budget, out / "sweeps.png", "CPU seconds of search trials")
    print(table)
    result = {
        "benchmark": "search/sweeps",
        "seeds": seeds,
        "slots": sorted({s.slots for pair in pairs for s in pair}),
        "median": medians(found),
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
        with tempfile.TemporaryDirectory() as folder:
            compare(1, Path(folder), SMALL)
        return
    compare(options.seeds, options.out.absolute(), ())


if __name__ == "__main__":
    main()
