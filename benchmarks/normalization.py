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
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from normalization_trials import (
    LENGTHS,
    MODES,
    RANGES,
    Floats,
    Interval,
    Result,
    Setting,
    bootstrap,
    build_training,
    compute_attainment_difference,
    compute_hypervolume,
    find_front,
    run,
)
from numpy.typing import NDArray

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis

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


WIDTH = (RANGES["mixed"][1] - RANGES["mixed"][0]) / (RANGES["equal"][1] - RANGES["equal"][0])
"""Ratio of the ranges of correctness."""
ROUNDING = 0.01
"""Largest relative error of the ratio of two weights."""


@dataclass(frozen=True)
class Box:
    """Objectives of a task with their worst values of interest and best values."""

    bounds: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"correctness": (0, 1), "format": (0, 1), "length": (0, 1)}
    )

    def __iter__(self) -> Iterator[str]:
        return iter(self.bounds)

    def compute_shares(self, values: Mapping[str, float]) -> list[float]:
        """Compute each objective as a share of the range from worst to best."""
        return [(values[name] - low) / (high - low) for name, (low, high) in self.bounds.items()]


BOXES = {
    "math": Box(),
    "tools": Box({"correctness": (0, 3), "format": (0, 1), "length": (0, 1)}),
    "code": Box(),
}


@dataclass(frozen=True)
class Cell:
    """Results of one mode with one form of ranges on one task."""

    task: str
    ranges: str
    mode: str
    learning_rate: float
    weights: tuple[float, ...]
    results: Sequence[Sequence[Result]]
    """W lists of S results."""

    @property
    def values(self) -> Floats:
        """Test objectives as shares of their box, `[S, W, M]`."""
        shares = BOXES[self.task].compute_shares
        return np.array([[shares(one.test) for one in seeds] for seeds in self.results]).swapaxes(
            0, 1
        )

    @property
    def means(self) -> Floats:
        """Means over seeds of the test objectives in their own units, `[W, M]`."""
        names = list(BOXES[self.task])
        return np.array(
            [
                [np.mean([one.test[name] for one in seeds]) for name in names]
                for seeds in self.results
            ]
        )

    @property
    def on_front(self) -> list[bool]:
        """True for each weight setting whose means no other setting of the cell dominates."""
        return find_front(self.values.mean(axis=0)).tolist()

    def compute_hypervolume(self) -> Interval:
        """Compute the hypervolume of the means over seeds."""
        values = self.values
        return bootstrap(len(values), lambda seeds: compute_hypervolume(values[seeds].mean(axis=0)))

    def compute_distinct(self) -> float:
        """Compute the mean number of distinct advantages in a batch of the cell's trainings."""
        return float(np.mean([one.distinct[self.mode] for seeds in self.results for one in seeds]))


@dataclass(frozen=True)
class Comparison:
    """Comparison of two cells of a task; the bootstrap draws the same seeds for both."""

    one: Cell
    other: Cell

    def compute_hypervolume_difference(self) -> Interval:
        """Compute the difference in hypervolume of the means over seeds."""
        ours, theirs = self.one.values, self.other.values

        def difference(seeds: NDArray[np.int64]) -> float:
            return compute_hypervolume(ours[seeds].mean(axis=0)) - compute_hypervolume(
                theirs[seeds].mean(axis=0)
            )

        return bootstrap(len(ours), difference)

    def compute_attainment_difference(self) -> tuple[float, float]:
        """Compute how much more often each of the two cells attains goals."""
        return compute_attainment_difference(self.one.values, self.other.values)

    def __str__(self) -> str:
        """Describe the comparison for a table."""
        if self.one.mode == self.other.mode:
            return f"{self.one.mode}: {self.one.ranges} against {self.other.ranges}"
        return f"{self.one.ranges}: {self.one.mode} against {self.other.mode}"


def list_comparisons(cells: Sequence[Cell]) -> list[Comparison]:
    """List GDPO against the other modes for both forms of ranges, and each mode with both forms."""
    by_key = {(cell.task, cell.ranges, cell.mode): cell for cell in cells}
    pairs: list[Comparison] = []
    for task in dict.fromkeys(cell.task for cell in cells):
        for ranges in RANGES:
            pairs += [
                Comparison(by_key[task, ranges, MODES[0]], by_key[task, ranges, mode])
                for mode in MODES[1:]
            ]
        pairs += [
            Comparison(by_key[task, "mixed", mode], by_key[task, "equal", mode]) for mode in MODES
        ]
    return pairs


def measure_distances(results: Iterable[Result], ratio: float) -> dict[tuple[str, str], float]:
    """Measure the distance of trainings with mixed ranges at w and equal ranges at w / `ratio`.

    With a ratio of 1 their weights are equal. With `WIDTH` their weights times ranges are equal, so
    that a mode that sums rewards first gives equal results.

    Returns:
        (task, mode) -> mean absolute difference of the test objectives as shares of their box,
        between trainings of one seed and learning rate.
    """
    tested = {
        result.setting: BOXES[result.setting.task].compute_shares(result.test) for result in results
    }
    distances: dict[tuple[str, str], list[float]] = {}
    for setting, shares in tested.items():
        if setting.ranges != "mixed":
            continue
        for weight in {other.weight for other in tested}:
            twin = replace(setting, ranges="equal", weight=weight)
            if twin in tested and abs(setting.weight / (ratio * weight) - 1) < ROUNDING:
                difference = np.abs(np.subtract(shares, tested[twin])).mean()
                distances.setdefault((setting.task, setting.mode), []).append(float(difference))
    return {key: float(np.mean(values)) for key, values in distances.items()}


def measure_seed_distances(results: Iterable[Result]) -> dict[tuple[str, str], float]:
    """Measure the same distance between seeds of trainings with equal settings."""
    alike: dict[Setting, list[Floats]] = {}
    for result in results:
        shares = BOXES[result.setting.task].compute_shares(result.test)
        alike.setdefault(replace(result.setting, seed=0), []).append(np.array(shares))
    distances: dict[tuple[str, str], list[float]] = {}
    for setting, seeds in alike.items():
        differences = [np.abs(a - b).mean() for a, b in itertools.combinations(seeds, 2)]
        distances.setdefault((setting.task, setting.mode), []).extend(map(float, differences))
    return {key: float(np.mean(values)) for key, values in distances.items() if values}


def count_distinct_by_weight(
    cells: Sequence[Cell],
) -> dict[tuple[str, str, float], dict[str, float]]:
    """Count the distinct advantages of every mode on the same batches, those of all modes.

    Returns:
        (task, ranges, weight) -> mode -> mean number of distinct advantages.
    """
    batches: dict[tuple[str, str, float], list[Mapping[str, float]]] = {}
    for cell in cells:
        for weight, seeds in zip(cell.weights, cell.results, strict=True):
            counts = batches.setdefault((cell.task, cell.ranges, weight), [])
            counts += [one.distinct for one in seeds]
    return {
        key: {mode: float(np.mean([count[mode] for count in counts])) for mode in MODES}
        for key, counts in batches.items()
    }


def render_markdown(cells: Sequence[Cell], results: Collection[Result]) -> str:
    """Render every figure as tables, one section for each task.

    `results` are all trainings, including those that decide the learning rates.
    """
    sections = []
    for task in dict.fromkeys(cell.task for cell in cells):
        own = [cell for cell in cells if cell.task == task]
        seeds = len(own[0].results[0])
        names = ", ".join(BOXES[task])
        sections += [
            f"### {task.capitalize()}\n",
            f"Means over {seeds} seeds of {names} at weights 1 : w : w; bold: on the front of its "
            "row.\n",
            _render_points(own),
            "Hypervolume of these means (share of the box from the worst value of interest to the "
            "best), 95 % bootstrap over seeds; span of each objective on the front; distinct "
            "advantages in a batch of 64.\n",
            _render_modes(own),
            "Difference in hypervolume, and the share of all goals that one side attains more "
            "often than the other, weighted by how much more often.\n",
            _render_comparisons(own),
            "Distinct advantages in a batch of 64, all modes on the same batches.\n",
            _render_distinct(own),
            "Mean difference of the objectives, as a share of their box, between trainings of the "
            "same seed and learning rate.\n",
            _render_distances(task, results),
        ]
    return "\n".join(sections)


def build_figures(cells: Sequence[Cell], results: Collection[Result]) -> dict[str, object]:
    """Build the same figures for the line of JSON."""
    return {
        "modes": [
            {
                "task": cell.task,
                "ranges": cell.ranges,
                "mode": cell.mode,
                "learning_rate": cell.learning_rate,
                "weights": cell.weights,
                "means": cell.means.round(4).tolist(),
                "on_front": cell.on_front,
                "hypervolume": _round_interval(cell.compute_hypervolume()),
                "distinct": round(cell.compute_distinct(), 2),
            }
            for cell in cells
        ],
        "comparisons": [
            {
                "task": comparison.one.task,
                "what": str(comparison),
                "hypervolume": _round_interval(comparison.compute_hypervolume_difference()),
                "attained_more_and_less": [
                    round(part, 4) for part in comparison.compute_attainment_difference()
                ],
            }
            for comparison in list_comparisons(cells)
        ],
        "apart_at_same_weights": _join_keys(measure_distances(results, 1)),
        "apart_at_same_scales": _join_keys(measure_distances(results, WIDTH)),
        "apart_between_seeds": _join_keys(measure_seed_distances(results)),
    }


def _render_points(cells: Sequence[Cell]) -> str:
    rows = [["ranges", "mode", *(f"w = {weight:g}" for weight in cells[0].weights)]]
    for cell in cells:
        texts = [" ".join(f"{value:.2f}" for value in point) for point in cell.means]
        best = zip(texts, cell.on_front, strict=True)
        rows.append([cell.ranges, cell.mode, *(f"**{t}**" if on else t for t, on in best)])
    return _render_table(rows)


def _render_modes(cells: Sequence[Cell]) -> str:
    objectives = list(BOXES[cells[0].task])
    rows = [["ranges", "mode", "lr", "on front", *objectives, "hypervolume", "distinct"]]
    for cell in cells:
        members = cell.means[cell.on_front]
        spans = [
            f"{low:.2f} to {high:.2f}"
            for low, high in zip(members.min(0), members.max(0), strict=True)
        ]
        count = f"{len(members)} of {len(cell.weights)}"
        own = [cell.ranges, cell.mode, f"{cell.learning_rate:g}", count, *spans]
        rows.append([*own, str(cell.compute_hypervolume()), f"{cell.compute_distinct():.1f}"])
    return _render_table(rows)


def _render_comparisons(cells: Sequence[Cell]) -> str:
    rows = [["", "hypervolume", "attained more often", "less often"]]
    for comparison in list_comparisons(cells):
        more, less = comparison.compute_attainment_difference()
        rows.append(
            [
                str(comparison),
                str(comparison.compute_hypervolume_difference()),
                f"{more:.3f}",
                f"{less:.3f}",
            ]
        )
    return _render_table(rows)


def _render_distinct(cells: Sequence[Cell]) -> str:
    rows = [["ranges", "w", *MODES]]
    for (_, ranges, weight), counts in count_distinct_by_weight(cells).items():
        rows.append([ranges, f"{weight:g}", *(f"{counts[mode]:.1f}" for mode in MODES)])
    return _render_table(rows)


def _render_distances(task: str, results: Collection[Result]) -> str:
    rows = [["", *MODES]]
    measures = {
        "mixed and equal at the same w": measure_distances(results, 1),
        f"mixed at w, equal at w / {WIDTH:g}": measure_distances(results, WIDTH),
        "for comparison: two seeds of one setting": measure_seed_distances(results),
    }
    for text, distances in measures.items():
        rows.append([text, *(f"{distances.get((task, mode), np.nan):.3f}" for mode in MODES)])
    return _render_table(rows)


def _render_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body, ""])


def _join_keys(values: Mapping[tuple[str, str], float]) -> dict[str, float]:
    return {" ".join(key): round(value, 4) for key, value in values.items()}


def _round_interval(interval: Interval) -> list[float]:
    return [round(value, 4) for value in (interval.value, interval.low, interval.high)]


ACROSS, UP = "correctness", ("length", "format")


def write_picture(cells: Sequence[Cell], path: Path) -> None:
    """Draw a row for each task, and a column for each form of ranges and objective."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    columns = [(up, ranges) for up in UP for ranges in RANGES]
    size = (len(columns) * 0.88 * SIDE, len(tasks) * SIDE + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(tasks), len(columns), squeeze=False, sharex="row")
    for row, task in zip(axes, tasks, strict=True):
        row[1].sharey(row[0])
        row[3].sharey(row[2])
        for axis, (up, ranges) in zip(row, columns, strict=True):
            drawn = [cell for cell in cells if (cell.task, cell.ranges) == (task, ranges)]
            for cell in drawn:
                _draw(axis, cell, up)
            style_axis(axis, ACROSS, up)
            low, high = RANGES[ranges]
            axis.set_title(
                f"{task}, correctness earns {low:g} to {high:g}", size=10, color=style.INK
            )
    figure.suptitle(
        "Means over seeds on test prompts; lines join the weights of format and length, from low "
        "to high",
        x=0.01,
        ha="left",
        size=12,
        color=style.INK,
    )
    figure.legend(
        handles=_build_legend(),
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=FONT_SIZE,
    )
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())


def _draw(axis: Axes, cell: Cell, up: str) -> None:
    mark = style.get_mark(cell.mode)
    x, y = (_compute_mean_and_error(cell, name) for name in (ACROSS, up))
    axis.errorbar(
        x[0],
        y[0],
        xerr=x[1],
        yerr=y[1],
        color=mark.color,
        elinewidth=0.9,
        linewidth=0.8,
        alpha=0.5,
        zorder=2,
    )
    for point in zip(x[0], y[0], cell.on_front, strict=True):
        axis.plot(
            *point[:2],
            linestyle="none",
            marker=mark.matplotlib,
            markersize=7,
            markerfacecolor=mark.color if point[2] else style.PAPER,
            markeredgecolor=mark.color,
            markeredgewidth=1.2,
            zorder=3,
        )


def _compute_mean_and_error(cell: Cell, name: str) -> tuple[list[float], list[float]]:
    values = np.array([[one.test[name] for one in seeds] for seeds in cell.results])
    errors = values.std(axis=1, ddof=1) / values.shape[1] ** 0.5
    return values.mean(axis=1).tolist(), errors.tolist()


def _build_legend() -> list[Line2D]:
    handles = [
        _build_handle(mode, style.get_mark(mode), style.get_mark(mode).color) for mode in MODES
    ]
    grey = style.Mark(style.MUTED, "circle", "o")
    return [*handles, _build_handle("dominated by its own mode", grey, style.PAPER)]


def _build_handle(label: str, mark: style.Mark, fill: str) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=mark.matplotlib,
        markersize=7,
        markerfacecolor=fill,
        markeredgecolor=mark.color,
        label=label,
    )


if __name__ == "__main__":
    main()
