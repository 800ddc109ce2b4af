"""GDPO, GRPO and GRPO without std on one grid of weights, with equal and with mixed reward ranges.

    python experiments/normalization.py [--tasks math tools] [--seeds 3] [--out DIRECTORY] [--small]

docs/normalization.md has its figures: commit 7d6e8d38 of 2026-11-21, problems that the tasks `math`
and `tools` write themselves, 216 trainings of the embedded policies.

Every training has the same budget. Weights of correctness, format and length are 1 : w : w. With
equal ranges every reward lies in [0, 1]. With mixed ranges correctness lies in [-3, 3], by an
affine change of the reward alone: the held-out metrics, and all figures here, stay the same.

The step size of a learning rate depends on the mode, so each mode gets the better of two rates, by
the validation hypervolume of seed 0 on three of the weights, for both forms of ranges together. All
other figures are on test prompts. DIRECTORY keeps the trainings in `trainings.jsonl`, so that an
interrupted run resumes, and gets `table.md` and `normalization.png`. The last line is JSON.

Objectives are shares of the range from their worst value of interest (0) to their best. Shapes: S
seeds, W weight settings, M objectives, Q goals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jobs import Job, Result, finish
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from gdpo_tune.analysis import pareto
from gdpo_tune.analysis.uncertainty import compute_interval
from gdpo_tune.core import registry
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Objective
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis
from gdpo_tune.tasks.base import Problem, Scores, Split
from gdpo_tune.tasks.math import MathTask
from gdpo_tune.tasks.tools import ToolsTask
from gdpo_tune.training import train
from gdpo_tune.training.normalization import compute_advantages

Floats = NDArray[np.float64]
MODES = ("gdpo", "grpo", "grpo_no_std")
RANGES = {"equal": (0.0, 1.0), "mixed": (-3.0, 3.0)}
"""Range of the correctness reward, beside format and length in {0, 1}."""
WIDTH = 6.0
"""Ratio of the two ranges."""
NAMES = ("correctness", "format", "length")
GOALS = tuple(Objective(name, "maximize", 0.0) for name in NAMES)
GROUP_SIZE = 8
STEP = WIDTH**0.5
"""Ratio of neighbouring weights; two steps equal the sixfold range of correctness."""
WEIGHTS = tuple(round(STEP**power, 3) for power in (-3, -2, -1, 0, 1))
LEARNING_RATES = (1.5e-4, 3e-4)
ROUNDING = 0.01
"""Largest relative error of the ratio of two weights."""
TOLERANCE = 1e-3
"""Advantages that are closer than this count as equal: `eps` alone sets them 1e-4 apart."""
GRID = 24
"""Number of goals along each objective."""
RESAMPLES = 2000


class TaskForm(NamedTuple):
    """A task as it is trained here."""

    kind: type
    natural: tuple[float, float]
    """Range of its correctness reward."""
    best: float
    """Best held-out correctness; the worst of interest is 0."""
    longest: int
    limit: int
    """Tokens of the longest completion, and length limit, as in the shipped search space."""


TASKS = {
    "math": TaskForm(MathTask, (0.0, 1.0), 1.0, 48, 14),
    "tools": TaskForm(ToolsTask, (-3.0, 3.0), 3.0, 64, 24),
}

# --- one training ---------------------------------------------------------------------------------

_BATCHES: list[Mapping[str, Sequence[float | None]]] = []
"""Rewards of the training batches of the trial in progress."""


class _Ranged:
    """Mixin of a task: changes the range of its correctness reward, and keeps its batches."""

    natural: tuple[float, float]
    wanted: tuple[float, float]

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        problems: list[Problem] = super().problems(split, count, seed)
        if split == "train":
            self._trained_on = {problem.prompt for problem in problems}
        return problems

    def score(self, problems: Any, completions: Any, lengths: Any, *others: Any) -> Scores:
        scores: Scores = super().score(problems, completions, lengths)
        values = rescale(scores.rewards["correctness"], self.natural, self.wanted)
        rewards = {**scores.rewards, "correctness": values}
        if problems[0].prompt in self._trained_on:
            _BATCHES.append(rewards)
        return Scores(rewards=rewards, metrics=scores.metrics)


def rescale(
    values: Sequence[float | None], natural: tuple[float, float], wanted: tuple[float, float]
) -> list[float | None]:
    """Map values from one range to another one; None (not scored) stays None."""
    scale = (wanted[1] - wanted[0]) / (natural[1] - natural[0])
    return [None if v is None else wanted[0] + (v - natural[0]) * scale for v in values]


def build_task_info(task: str, ranges: str) -> TaskInfo:
    own, form = registry.describe_task(task), TASKS[task]
    fields = {"natural": form.natural, "wanted": RANGES[ranges]}
    kind = type(f"{form.kind.__name__}_{ranges}", (_Ranged, form.kind), fields)
    return replace(own, build=kind, rewards={**own.rewards, "correctness": RANGES[ranges]})


@contextmanager
def register_task(name: str, info: TaskInfo) -> Iterator[None]:
    """Register a task for a `with` block, so that the trainer finds it."""
    globals()["REGISTERED"] = info
    registry.TASKS[name] = f"{__name__}:REGISTERED"
    try:
        yield
    finally:
        del registry.TASKS[name]


def run(job: Job) -> dict[str, Any]:
    """Train one setting and evaluate it; `distinct` are distinct advantages a batch, by mode."""
    task, weight = job["task"], job["weight"]
    info, name = build_task_info(task, job["ranges"]), f"{task} {job['ranges']}"
    params = {name: parameter.default for name, parameter in list_parameters(info).items()}
    params |= {
        "normalization": job["mode"],
        "group_size": GROUP_SIZE,
        "learning_rate": job["learning_rate"],
        "reward_weights.format": weight,
        "reward_weights.length": weight,
    }
    training = TrainingSettings(
        steps=job["steps"],
        max_completion_length=TASKS[task].longest,
        length_limit=TASKS[task].limit,
        validation_prompts=job["prompts"] // 2,
        test_prompts=job["prompts"],
        evaluate_every=job["steps"],
        checkpoint_every=job["steps"],
    )
    _BATCHES.clear()
    with tempfile.TemporaryDirectory() as directory, register_task(name, info):
        config = TrialConfig(name, info.embedded, job["seed"], params, training, Path(directory))
        outcome = train(config, resume=None, report=lambda *_: None)
    weights = [float(params[f"reward_weights.{name}"]) for name in info.rewards]
    return {
        "validation": {name: estimate.mean for name, estimate in outcome.validation.items()},
        "test": {name: estimate.mean for name, estimate in outcome.test.items()},
        "distinct": count_distinct_advantages(_BATCHES, weights),
        "cpu_seconds": outcome.cost.cpu_seconds,
    }


def count_distinct_advantages(
    batches: Sequence[Mapping[str, Sequence[float | None]]], weights: Sequence[float]
) -> dict[str, float]:
    """Return mode -> mean number of distinct advantages of a batch."""
    totals = dict.fromkeys(MODES, 0)
    for batch in batches:
        columns = [[torch.nan if v is None else v for v in values] for values in batch.values()]
        rewards = torch.tensor(columns).T
        for mode in MODES:
            advantages = compute_advantages(rewards, torch.tensor(weights), GROUP_SIZE, mode)
            totals[mode] += int((np.diff(np.sort(advantages)) > TOLERANCE).sum()) + 1
    return {mode: total / len(batches) for mode, total in totals.items()}


# --- all trainings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Trainings of the experiment."""

    tasks: Sequence[str]
    weights: Sequence[float] = WEIGHTS
    learning_rates: Sequence[float] = LEARNING_RATES
    seeds: int = 3
    steps: int = 40
    prompts: int = 256
    """Number of test prompts; half as many are for validation."""

    @property
    def pilot_weights(self) -> Sequence[float]:
        """Lowest, middle and highest weight."""
        return sorted({self.weights[i] for i in (0, len(self.weights) // 2, -1)})

    def build_job(
        self, task: str, ranges: str, mode: str, weight: float, rate: float, seed: int
    ) -> dict[str, Any]:
        """Build the job of one training; format and length have the weight, correctness has 1."""
        setting = {"task": task, "ranges": ranges, "mode": mode, "weight": weight}
        sizes = {"seed": seed, "steps": self.steps, "prompts": self.prompts}
        return {**setting, "learning_rate": rate, **sizes}

    def list_pilot_jobs(self) -> list[dict[str, Any]]:
        """List the trainings that decide the learning rates."""
        parts = (self.tasks, RANGES, MODES, self.pilot_weights, self.learning_rates, [0])
        return [self.build_job(*part) for part in itertools.product(*parts)]

    def list_further_jobs(self, rates: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
        """List all trainings at the chosen rates, whole comparisons first."""
        further = [weight for weight in self.weights if weight not in self.pilot_weights]
        return [
            self.build_job(task, ranges, mode, weight, rates[task, mode], seed)
            for weights in (self.pilot_weights, further)
            for task, seed, weight, ranges, mode in itertools.product(
                self.tasks, range(self.seeds), weights, RANGES, MODES
            )
        ]


def build_table(jobs: Sequence[Job], results: Sequence[Result]) -> pd.DataFrame:
    """Build a table with a row a training: its setting, objectives and distinct advantages.

    Objectives on test prompts have their names, those on validation prompts `validation NAME`.
    """
    rows: list[dict[str, Any]] = []
    for job, one in zip(jobs, results, strict=True):
        row = {**job, **{f"distinct {mode}": count for mode, count in one["distinct"].items()}}
        for prefix, values in (("", one["test"]), ("validation ", one["validation"])):
            row |= {prefix + name: values[name] for name in NAMES}
            row[f"{prefix}correctness"] /= TASKS[job["task"]].best
        rows.append({**row, "cpu_seconds": one["cpu_seconds"]})
    return pd.DataFrame(rows).drop_duplicates()


def choose_rates(table: pd.DataFrame, plan: Plan) -> dict[tuple[str, str], float]:
    """Return task and mode -> the rate of the greatest validation hypervolume.

    Both forms of ranges count and get the same rate, so that their comparison does not depend on
    the noise of a seed.
    """
    volumes: dict[tuple[str, str], dict[float, float]] = {}
    for (task, mode, rate, _), rows in table.groupby(["task", "mode", "learning_rate", "ranges"]):
        shares = rows[[f"validation {name}" for name in NAMES]].to_numpy()
        of_mode = volumes.setdefault((task, mode), {})
        of_mode[rate] = of_mode.get(rate, 0.0) + pareto.compute_hypervolume(shares, GOALS)
    return {key: max(of_mode, key=of_mode.get) for key, of_mode in volumes.items()}


# --- figures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Results of one mode with one form of ranges on one task."""

    task: str
    ranges: str
    mode: str
    learning_rate: float
    weights: tuple[float, ...]
    values: Floats
    """Test objectives as shares, `[S, W, M]`."""
    distinct: float
    """Mean number of distinct advantages in a batch of its trainings."""

    @property
    def means(self) -> Floats:
        """Means over seeds of the test objectives in their own units, `[W, M]`."""
        return self.values.mean(axis=0) * [TASKS[self.task].best, 1, 1]

    @property
    def on_front(self) -> list[bool]:
        """True for each weight setting whose means no other setting of the cell dominates."""
        return (pareto.rank_points(self.means, GOALS) == 0).tolist()


def build_cells(
    table: pd.DataFrame, plan: Plan, rates: Mapping[tuple[str, str], float]
) -> list[Cell]:
    """Build the cells of every mode and form of ranges, of trainings at the chosen rates."""
    cells: list[Cell] = []
    for task, ranges, mode in itertools.product(plan.tasks, RANGES, MODES):
        own = (table.task == task) & (table.ranges == ranges) & (table["mode"] == mode)
        rows = table[own & (table.learning_rate == rates[task, mode])]
        rows = rows.sort_values(["seed", "weight"])
        values = rows[list(NAMES)].to_numpy().reshape(plan.seeds, len(plan.weights), len(NAMES))
        distinct, rate = float(rows[f"distinct {mode}"].mean()), rates[task, mode]
        cells.append(Cell(task, ranges, mode, rate, tuple(plan.weights), values, distinct))
    return cells


def bootstrap(count: int, statistic: Callable[[NDArray[np.int64]], float]) -> str:
    """Compute a statistic of all `count` seeds, and the interval of its bootstrap over seeds.

    Few seeds have few different draws (three have ten), so the interval is rather too short than
    too long.
    """
    rows = np.sort(np.random.default_rng(0).integers(count, size=(RESAMPLES, count)), axis=1)
    values = {key: statistic(np.array(key)) for key in {tuple(row) for row in rows.tolist()}}
    interval = compute_interval([values[tuple(row)] for row in rows.tolist()])
    return f"{statistic(np.arange(count)):.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def compute_volume(cell: Cell, seeds: NDArray[np.int64]) -> float:
    """Compute the hypervolume of the means over seeds, as a share of the box."""
    return pareto.compute_hypervolume(cell.values[seeds].mean(axis=0), GOALS)


def compute_attainment(values: Floats, wanted: Floats) -> Floats:
    """Compute for each goal of `[Q, M]` the share of seeds with a setting that reaches all of it.

    Source: Grunert da Fonseca, Fonseca and Hall 2001, Inferential performance assessment of
    stochastic optimisers and the attainment function.
    """
    reached = (wanted[:, None, None] <= values).all(axis=-1)
    return reached.any(axis=-1).mean(axis=-1)


def compute_attainment_difference(values: Floats, others: Floats) -> tuple[float, float]:
    """Compute how much more often each of two sides attains goals than the other.

    Returns:
        Means over all goals of the positive and of the negative part of the difference of both
        attainments. Their difference is that of the sides' mean hypervolumes, up to the grid.
    """
    middle = (np.arange(GRID) + 0.5) / GRID
    wanted = np.array(list(itertools.product(middle, repeat=values.shape[2])))
    difference = compute_attainment(values, wanted) - compute_attainment(others, wanted)
    return float(difference.clip(min=0).mean()), float((-difference).clip(min=0).mean())


def measure_distances(table: pd.DataFrame, ratio: float) -> pd.Series:
    """Measure the distance of trainings with mixed ranges at w and equal ranges at w / `ratio`.

    With a ratio of 1 their weights are equal. With `WIDTH` their weights times ranges are equal, so
    that a mode that sums rewards first gives equal results. The distance is the mean absolute
    difference of the objectives between trainings of one seed and learning rate, by task and mode.
    """
    alike = ["task", "mode", "learning_rate", "seed"]
    other = table[table.ranges == "equal"]
    pairs = table[table.ranges == "mixed"].merge(other, on=alike, suffixes=("", " b"))
    return _measure(pairs[(pairs.weight / (ratio * pairs["weight b"]) - 1).abs() < ROUNDING])


def measure_seed_distances(table: pd.DataFrame) -> pd.Series:
    """Measure the same distance between seeds of trainings with equal settings."""
    alike = ["task", "mode", "learning_rate", "ranges", "weight"]
    pairs = table.merge(table, on=alike, suffixes=("", " b"))
    return _measure(pairs[pairs.seed < pairs["seed b"]])


def _measure(pairs: pd.DataFrame) -> pd.Series:
    apart = sum((pairs[name] - pairs[f"{name} b"]).abs() for name in NAMES) / len(NAMES)
    return apart.groupby([pairs.task, pairs["mode"]]).mean()


# --- tables and picture ---------------------------------------------------------------------------


def list_comparisons(cells: Sequence[Cell]) -> Iterator[tuple[str, Cell, Cell]]:
    """Yield GDPO against the other modes for both forms of ranges, and each mode with both."""
    by_key = {(cell.ranges, cell.mode): cell for cell in cells}
    for ranges, mode in itertools.product(RANGES, MODES[1:]):
        name = f"{ranges}: {MODES[0]} against {mode}"
        yield name, by_key[ranges, MODES[0]], by_key[ranges, mode]
    for mode in MODES:
        yield f"{mode}: mixed against equal", by_key["mixed", mode], by_key["equal", mode]


def render_task(cells: Sequence[Cell], table: pd.DataFrame) -> str:
    """Render the figures of one task; `table` has all trainings, of both learning rates."""
    task, weights = cells[0].task, cells[0].weights
    seeds = len(cells[0].values)
    points = [["ranges", "mode", *(f"w = {weight:g}" for weight in weights)]]
    modes = [["ranges", "mode", "lr", "on front", *NAMES, "hypervolume", "distinct"]]
    for cell in cells:
        texts = [" ".join(f"{value:.2f}" for value in point) for point in cell.means]
        best = zip(texts, cell.on_front, strict=True)
        points.append([cell.ranges, cell.mode, *(f"**{t}**" if on else t for t, on in best)])
        members = cell.means[cell.on_front]
        spans = zip(members.min(0), members.max(0), strict=True)
        own = [cell.ranges, cell.mode, f"{cell.learning_rate:g}"]
        own += [f"{len(members)} of {len(weights)}", *(f"{a:.2f} to {b:.2f}" for a, b in spans)]
        volume = bootstrap(seeds, lambda drawn, cell=cell: compute_volume(cell, drawn))
        modes.append([*own, volume, f"{cell.distinct:.1f}"])
    sides = [["", "hypervolume", "attained more often", "less often"]]
    for name, one, other in list_comparisons(cells):

        def subtract(drawn: NDArray[np.int64], one: Cell = one, other: Cell = other) -> float:
            return compute_volume(one, drawn) - compute_volume(other, drawn)

        parts = compute_attainment_difference(one.values, other.values)
        sides.append([name, bootstrap(seeds, subtract), *(f"{part:.3f}" for part in parts)])
    columns = [f"distinct {mode}" for mode in MODES]
    rates = {cell.mode: cell.learning_rate for cell in cells}
    own = table[(table.task == task) & table.weight.isin(weights)]
    own = own[own.learning_rate == own["mode"].map(rates)]
    distinct = [["ranges", "w", *MODES]]
    for (ranges, weight), counts in own.groupby(["ranges", "weight"])[columns].mean().iterrows():
        distinct.append([ranges, f"{weight:g}", *(f"{count:.1f}" for count in counts)])
    measures = {
        "mixed and equal at the same w": measure_distances(table, 1),
        f"mixed at w, equal at w / {WIDTH:g}": measure_distances(table, WIDTH),
        "for comparison: two seeds of one setting": measure_seed_distances(table),
    }
    apart = [["", *MODES]]
    for name, found in measures.items():
        apart.append([name, *(f"{found.get((task, mode), np.nan):.3f}" for mode in MODES)])
    sections = {
        f"Means over {seeds} seeds of {', '.join(NAMES)} at weights 1 : w : w; bold: on the front "
        "of its row.": points,
        "Hypervolume of these means (share of the box from the worst value of interest to the "
        "best), 95 % bootstrap over seeds; span of each objective on the front; distinct "
        "advantages in a batch of 64.": modes,
        "Difference in hypervolume, and the share of all goals that one side attains more often "
        "than the other, weighted by how much more often.": sides,
        "Distinct advantages in a batch of 64, all modes on the same batches.": distinct,
        "Mean difference of the objectives, as a share of their box, between trainings of the same "
        "seed and learning rate.": apart,
    }
    lines = [f"### {task.capitalize()}", ""]
    for text, (head, *body) in sections.items():
        rows = [head, ["---"] * len(head), *body]
        lines += [text, "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


ACROSS, UP = "correctness", ("length", "format")


def write_picture(cells: Sequence[Cell], path: Path) -> None:
    """Draw a row for each task, and a column for each form of ranges and objective."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    columns = list(itertools.product(UP, RANGES))
    size = (len(columns) * 0.88 * SIDE, len(tasks) * SIDE + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(tasks), len(columns), squeeze=False, sharex="row")
    for row, task in zip(axes, tasks, strict=True):
        row[1].sharey(row[0])
        row[3].sharey(row[2])
        for axis, (up, ranges) in zip(row, columns, strict=True):
            for cell in cells:
                if (cell.task, cell.ranges) == (task, ranges):
                    _draw(axis, cell, up)
            style_axis(axis, ACROSS, up)
            low, high = RANGES[ranges]
            title = f"{task}, correctness earns {low:g} to {high:g}"
            axis.set_title(title, size=10, color=style.INK)
    text = "Means over seeds on test prompts; lines join the weights of format and length, from low"
    figure.suptitle(f"{text} to high", x=0.01, ha="left", size=12, color=style.INK)
    grey = style.Mark(style.MUTED, "circle", "o")
    marks = {mode: (style.get_mark(mode), style.get_mark(mode).color) for mode in MODES}
    marks["dominated by its own mode"] = (grey, style.PAPER)
    handles = [Line2D([], [], label=n, **_choose_marker(*mark)) for n, mark in marks.items()]
    place = {"loc": "outside lower left", "ncols": 5, "frameon": False}
    figure.legend(handles=handles, fontsize=FONT_SIZE, **place)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())


def _choose_marker(mark: style.Mark, fill: str) -> dict[str, Any]:
    colors = {"markerfacecolor": fill, "markeredgecolor": mark.color}
    return {"linestyle": "none", "marker": mark.matplotlib, "markersize": 7, **colors}


def _draw(axis: Any, cell: Cell, up: str) -> None:
    mark, places = style.get_mark(cell.mode), [NAMES.index(name) for name in (ACROSS, up)]
    units = [TASKS[cell.task].best if place == 0 else 1.0 for place in places]
    values = cell.values[:, :, places] * units
    x, y = values.mean(axis=0).T
    errors = values.std(axis=0, ddof=1).T / len(values) ** 0.5
    line = {"color": mark.color, "elinewidth": 0.9, "linewidth": 0.8, "alpha": 0.5, "zorder": 2}
    axis.errorbar(x, y, xerr=errors[0], yerr=errors[1], **line)
    for *point, is_member in zip(x, y, cell.on_front, strict=True):
        marker = _choose_marker(mark, mark.color if is_member else style.PAPER)
        axis.plot(*point, markeredgewidth=1.2, zorder=3, **marker)


def run_plan(plan: Plan, workers: int, out: Path) -> dict[str, object]:
    """Run or resume the trainings in directory `out`, and report on them."""
    kept, jobs = out / "trainings.jsonl", plan.list_pilot_jobs()
    rates = choose_rates(build_table(jobs, finish(jobs, run, kept, workers)), plan)
    jobs += plan.list_further_jobs(rates)
    table = build_table(jobs, finish(jobs, run, kept, workers))
    cells = build_cells(table, plan, rates)
    own = [[cell for cell in cells if cell.task == task] for task in plan.tasks]
    text = "\n".join(render_task(of_task, table) for of_task in own)
    (out / "table.md").write_text(text, encoding="utf-8")
    write_picture(cells, out / "normalization.png")
    print(text)
    seeds = np.arange(plan.seeds)
    volumes = {f"{c.task} {c.ranges} {c.mode}": round(compute_volume(c, seeds), 4) for c in cells}
    sizes = {"trainings": len(table), "steps": plan.steps, "seeds": plan.seeds}
    cpu = round(float(table.cpu_seconds.sum()), 1)
    return {"benchmark": "normalization", **sizes, "cpu_seconds": cpu, "hypervolume": volumes}


def main() -> None:
    """Train, report and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=LEARNING_RATES)
    parser.add_argument("--workers", type=int, default=1, help="processes that train side by side")
    parser.add_argument("--out", type=Path, default=Path("runs/normalization"))
    parser.add_argument("--small", action="store_true", help="seconds: shows that it runs")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one seed has no spread")
    plan = Plan(options.tasks, learning_rates=options.learning_rates, seeds=options.seeds)
    if options.small:
        plan = Plan(["math"], weights=WEIGHTS[1::2], seeds=2, steps=1, prompts=8)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) if options.small else options.out
        print(json.dumps(run_plan(plan, options.workers, out)))


if __name__ == "__main__":
    main()
