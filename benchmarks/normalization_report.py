"""Report of `normalization.py`: figures of its trainings, and tables of them.

Shapes: S seeds, W weight settings, M objectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from normalization_fronts import (
    Floats,
    Interval,
    bootstrap,
    compute_attainment_difference,
    compute_hypervolume,
    find_front,
)
from normalization_trials import MODES, RANGES, Result, Setting
from numpy.typing import NDArray

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
