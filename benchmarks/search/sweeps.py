"""Real sweeps of the embedded code task: halving against no stopping, at equal CPU time.

    python benchmarks/search/sweeps.py [--seeds 3] [--out FOLDER] [--small]

For every seed the command itself runs twice, without replicates: with the search of
`search_spaces/code.yaml` under `fifo`, then under `asha` with as many completions and up to twice
as many trials. Time is what all trainings of the search had cost when a trial came to its end,
stopped ones included, in units of what they cost under `fifo` with that seed; the hypervolume is
that of trials at full budget, on test prompts, constraints met on validation prompts. A sweep that
was killed goes on by the same command. FOLDER also gets `table.md` and `sweeps.png`. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measures import at_budgets

from gdpo_tune.analysis.pareto import hypervolume
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, dress
from gdpo_tune.files import write_whole
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec

SPACE = Path(__file__).resolve().parents[2] / "search_spaces" / "code.yaml"
SMALL = ("search.trials=2", "training.steps=4", "training.validation_prompts=8")
COLORS = {
    "fifo": style.MODES["grpo"].color,
    "asha": style.MODES["gdpo"].color,
}


@dataclass(frozen=True)
class Sweep:
    """What one sweep came to."""

    scheduler: str
    seed: int
    started: int
    complete: int
    cpu_seconds: float
    """Of all trainings of the search."""
    steps: Sequence[tuple[float, float]]
    """CPU seconds spent, and the hypervolume from then on."""

    def at(self, cpu_seconds: float) -> float:
        """The hypervolume once so much is spent."""
        return float(at_budgets(self.steps, [cpu_seconds])[0])


def searched(scheduler: str, seed: int, out: Path, given: Sequence[str]) -> Sweep:
    """Run a sweep, or what is left of it, by the command that everybody uses."""
    overrides = [
        *given,
        f"search.scheduler={{type: {scheduler}}}",
        f"search.seed={seed}",
        "search.replicates.max_runs=0",
        f"storage={out}",
        f"tracking.uri=sqlite:///{out.resolve()}/mlflow.db",
    ]
    name = f"{scheduler}-{seed}"
    settings = [part for override in overrides for part in ("--set", override)]
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(SPACE), "--name", name, *settings]
    with (out / f"{name}.log").open("a", encoding="utf-8") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    return read(load_spec(SPACE, overrides, name), scheduler, seed)


def read(spec: SweepSpec, scheduler: str, seed: int) -> Sweep:
    """A finished sweep, from its ledger."""
    with Ledger.open(spec, read_only=True) as ledger:
        records = [record for record in ledger.records() if record.role == "search"]
    records.sort(key=lambda record: record.finished or 0.0)
    goals = spec.objective_list()
    points: list[list[float]] = []
    steps: list[tuple[float, float]] = []
    for spent, record in zip(
        accumulate(record.cost.cpu_seconds for record in records), records, strict=True
    ):
        if record.state == "complete" and record.feasible:
            points.append([record.test[goal.name].mean for goal in goals])
            steps.append((spent, hypervolume(points, goals)))
    return Sweep(
        scheduler,
        seed,
        len(records),
        sum(record.state == "complete" for record in records),
        sum(record.cost.cpu_seconds for record in records),
        steps,
    )


def pair(seed: int, out: Path, given: Sequence[str]) -> tuple[Sweep, Sweep]:
    """The same search without stopping, and with it at the same number of completions."""
    spec = load_spec(SPACE, given)
    trials, training = spec.search.trials, spec.training
    # the published setting trains besides the search, and the budget counts it too
    completions = (trials + 1) * training.steps * training.completions_per_step
    more = (f"search.trials={2 * trials}", f"search.budget.completions={completions}")
    return searched("fifo", seed, out, given), searched("asha", seed, out, (*given, *more))


def table(pairs: Sequence[tuple[Sweep, Sweep]]) -> str:
    """Markdown, a line a seed."""
    lines = [
        "| seed | CPU s | complete of started: fifo, asha | at half: fifo, asha | in the end: "
        "fifo, asha |",
        "|---|---|---|---|---|",
    ]
    for fifo, asha in pairs:
        end = fifo.cpu_seconds
        counts = ", ".join(f"{sweep.complete} of {sweep.started}" for sweep in (fifo, asha))
        half, whole = (
            ", ".join(f"{sweep.at(share * end):.3f}" for sweep in (fifo, asha))
            for share in (0.5, 1.0)
        )
        lines.append(f"| {fifo.seed} | {end:.0f} | {counts} | {half} | {whole} |")
    return "\n".join(lines) + "\n"


def write_picture(pairs: Sequence[tuple[Sweep, Sweep]], path: Path) -> None:
    """A line a sweep; the file appears whole or not at all."""
    figure = Figure(figsize=(2.2 * SIDE, 1.1 * SIDE), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for fifo, asha in pairs:
        for sweep in (fifo, asha):
            spent = [0.0, *(step[0] / fifo.cpu_seconds for step in sweep.steps)]
            volumes = [0.0, *(step[1] for step in sweep.steps)]
            label = sweep.scheduler if fifo is pairs[0][0] else None
            color = COLORS[sweep.scheduler]
            axis.step(spent, volumes, where="post", color=color, linewidth=1.3, label=label)
    axis.axvline(1.0, color=style.INK, linewidth=0.6)
    dress(axis, "CPU time spent, in that of fifo", "hypervolume of finished trials")
    axis.legend(frameon=False, fontsize=FONT_SIZE)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_whole(path, picture.getvalue())


def compare(seeds: int, out: Path, given: Sequence[str]) -> dict[str, object]:
    """Run and report; the figures for the line of JSON."""
    pairs = [pair(seed, out, given) for seed in range(seeds)]
    text = table(pairs)
    (out / "table.md").write_text(text, encoding="utf-8")
    write_picture(pairs, out / "sweeps.png")
    print(text)
    ratios = [
        asha.at(fifo.cpu_seconds) / fifo.at(fifo.cpu_seconds) for fifo, asha in pairs if fifo.steps
    ]
    return {
        "benchmark": "search/sweeps",
        "seeds": seeds,
        "cpu_seconds": [round(fifo.cpu_seconds, 1) for fifo, _ in pairs],
        "fifo": [round(fifo.at(fifo.cpu_seconds), 4) for fifo, _ in pairs],
        "asha": [round(asha.at(fifo.cpu_seconds), 4) for fifo, asha in pairs],
        "asha_to_fifo": round(median(ratios), 3) if ratios else None,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/search/sweeps"))
    parser.add_argument("--small", action="store_true", help="short trainings: shows that it runs")
    options = parser.parse_args()
    if options.small:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(1, Path(folder), SMALL)))
        return
    print(json.dumps(compare(options.seeds, options.out, ())))


if __name__ == "__main__":
    main()
