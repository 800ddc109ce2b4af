"""GDPO, GRPO and GRPO without std on one grid of weights, with equal and with mixed reward ranges.

    python benchmarks/normalization.py [--tasks math tools] [--seeds 3] [--out DIRECTORY] [--small]

Every training has the same budget. Weights of correctness, format and length are 1 : w : w. With
equal ranges every reward lies in [0, 1]. With mixed ranges correctness lies in [-3, 3], by an
affine change of the reward alone: the held-out metrics, and all figures here, stay the same.

The step size of a learning rate depends on the mode, so each mode gets the better of two rates. The
criterion is the validation hypervolume of seed 0 on three of the weights, for both forms of ranges
together. All other figures are on test prompts. DIRECTORY/trainings.jsonl keeps the trainings, so
that an interrupted run resumes. DIRECTORY also gets `table.md` and `normalization.png`. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from normalization_fronts import compute_hypervolume
from normalization_report import BOXES, Cell, build_figures, render_markdown
from normalization_trials import LENGTHS, MODES, RANGES, Result, Setting, build_training, run

from gdpo_tune.core.settings import TrainingSettings

STEP = 6**0.5
"""Ratio of neighbouring weights; two steps equal the sixfold range of correctness."""
WEIGHTS = tuple(round(STEP**power, 3) for power in (-3, -2, -1, 0, 1))
LEARNING_RATES = (1.5e-4, 3e-4)


@dataclass
class Plan:
    """Trainings of the benchmark."""

    tasks: Sequence[str]
    weights: Sequence[float] = WEIGHTS
    learning_rates: Sequence[float] = LEARNING_RATES
    seeds: int = 3
    steps: int = 40
    prompts: int = 256
    """Number of test prompts; half as many are for validation."""
    done: dict[Setting, Result] = field(default_factory=dict)

    @property
    def pilot_weights(self) -> Sequence[float]:
        """Lowest, middle and highest weight."""
        return sorted({self.weights[i] for i in (0, len(self.weights) // 2, -1)})

    def list_pilot_settings(self) -> list[Setting]:
        """List the trainings that decide the learning rates."""
        return [
            setting
            for task in self.tasks
            for rate in self.learning_rates
            for mode in MODES
            for ranges in RANGES
            for setting in self._list_rate_trials(task, ranges, mode, rate)
        ]

    def choose_rate(self, task: str, mode: str) -> float | None:
        """Return the rate of the greatest validation hypervolume; None before any is trained.

        Both forms of ranges count and get the same rate, so that their comparison does not depend
        on the noise of a seed.
        """
        volumes: dict[float, float] = {}
        for rate in self.learning_rates:
            settings = [self._list_rate_trials(task, ranges, mode, rate) for ranges in RANGES]
            if all(setting in self.done for form in settings for setting in form):
                volumes[rate] = sum(map(self._compute_validation_hypervolume, settings))
        return max(volumes, key=lambda rate: volumes[rate], default=None)

    def _list_rate_trials(self, task: str, ranges: str, mode: str, rate: float) -> list[Setting]:
        return [Setting(task, ranges, mode, weight, rate, 0) for weight in self.pilot_weights]

    def _compute_validation_hypervolume(self, settings: Sequence[Setting]) -> float:
        shares = [BOXES[one.task].compute_shares(self.done[one].validation) for one in settings]
        return compute_hypervolume(np.array(shares))

    def list_remaining_settings(self) -> list[Setting]:
        """List all other trainings, in an order that completes whole comparisons early."""
        pilot = self.pilot_weights
        further = [weight for weight in self.weights if weight not in pilot]
        return [
            Setting(task, ranges, mode, weight, rate, seed)
            for weights in (pilot, further)
            for task in self.tasks
            for seed in range(self.seeds)
            for weight in weights
            for ranges in RANGES
            for mode in MODES
            if (rate := self.choose_rate(task, mode)) is not None
        ]

    def build_cells(self) -> list[Cell]:
        """Build the cells of every mode and form of ranges, from fully trained weights alone."""
        return [cell for task in self.tasks for cell in self._build_cells(task)]

    def _build_cells(self, task: str) -> list[Cell]:
        rates = {mode: rate for mode in MODES if (rate := self.choose_rate(task, mode)) is not None}
        if len(rates) < len(MODES):
            return []
        forms = [(ranges, mode) for ranges in RANGES for mode in MODES]

        def seeds(ranges: str, mode: str, weight: float) -> list[Setting]:
            return [Setting(task, ranges, mode, weight, rates[mode], s) for s in range(self.seeds)]

        trained = [
            weight
            for weight in self.weights
            if all(s in self.done for ranges, mode in forms for s in seeds(ranges, mode, weight))
        ]
        if not trained:
            return []
        return [
            Cell(
                task,
                ranges,
                mode,
                rates[mode],
                tuple(trained),
                [[self.done[s] for s in seeds(ranges, mode, weight)] for weight in trained],
            )
            for ranges, mode in forms
        ]


def train_all(settings: Iterable[Setting], plan: Plan, workers: int, path: Path) -> None:
    """Train the missing settings; write each result to disk before waiting for the next."""
    missing = [setting for setting in settings if setting not in plan.done]
    jobs = [(s, build_training(s.task, plan.steps, plan.prompts)) for s in missing]
    started = time.perf_counter()
    for count, result in enumerate(_run_jobs(jobs, workers), 1):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        plan.done[result.setting] = result
        values = "  ".join(f"{name} {result.test[name]:.3f}" for name in BOXES[result.setting.task])
        print(
            f"{count}/{len(missing)}  {time.perf_counter() - started:.0f} s  {result.setting}  "
            f"{values}  {result.cpu_seconds:.1f} CPU-s",
            flush=True,
        )


def _run_jobs(jobs: Sequence[tuple[Setting, TrainingSettings]], workers: int) -> Iterator[Result]:
    if workers == 1:
        yield from map(run, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(run, jobs)


def read_results(path: Path, plan: Plan) -> None:
    """Read results of an earlier run with the same training; remove an incomplete last line."""
    if not path.exists():
        return
    whole = path.read_bytes().rpartition(b"\n")[0]
    path.write_bytes(whole + b"\n" if whole else b"")
    for line in whole.splitlines():
        entry = json.loads(line)
        result = Result(**{**entry, "setting": Setting(**entry["setting"])})
        training = build_training(result.setting.task, plan.steps, plan.prompts)
        if result.training == training.model_dump():
            plan.done[result.setting] = result


def main() -> None:
    """Train, report and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=LENGTHS, default=["math", "tools"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=LEARNING_RATES)
    parser.add_argument("--workers", type=int, default=1, help="processes that train side by side")
    parser.add_argument("--out", type=Path, default=Path("runs/normalization"))
    parser.add_argument("--only-report", action="store_true", help="train nothing more")
    parser.add_argument("--small", action="store_true", help="seconds: shows that it runs")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one seed has no spread")
    if options.small:
        plan = Plan(["math"], weights=WEIGHTS[1::2], seeds=2, steps=1, prompts=8)
        with tempfile.TemporaryDirectory() as directory:
            run_plan(plan, options.workers, Path(directory), options.only_report)
    else:
        plan = Plan(options.tasks, learning_rates=options.learning_rates, seeds=options.seeds)
        run_plan(plan, options.workers, options.out, options.only_report)


def run_plan(plan: Plan, workers: int, out: Path, only_report: bool) -> None:
    """Run or resume the trainings in directory `out` and report on it."""
    from normalization_picture import write_picture

    out.mkdir(parents=True, exist_ok=True)
    path = out / "trainings.jsonl"
    read_results(path, plan)
    if not only_report:
        train_all(plan.list_pilot_settings(), plan, workers, path)
        train_all(plan.list_remaining_settings(), plan, workers, path)
    cells = plan.build_cells()
    if not cells:
        raise SystemExit(f"{len(plan.done)} trainings in {path} are too few for any figure")
    table = render_markdown(cells, plan.done.values())
    (out / "table.md").write_text(table, encoding="utf-8")
    write_picture(cells, out / "normalization.png")
    print(table)
    result = {
        "benchmark": "normalization",
        "trainings": len(plan.done),
        "steps": plan.steps,
        "seeds": plan.seeds,
        "cpu_seconds": round(sum(result.cpu_seconds for result in plan.done.values()), 1),
        **build_figures(cells, plan.done.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
