"""PNG of hypervolume against budget: a panel for each problem, a line for each contestant."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measures import compute_median, evaluate_at_budgets

from gdpo_tune.core.files import write_atomically
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis

OURS = "gdpo_tune"
ACROSS = 3
"""Most panels side by side."""
LEGEND = 2.6
"""Width of the legend in inches."""
GRID = 181
"""Number of budgets at which a line is drawn."""
COLORS = [mark.color for mark in style.MODES.values()]
SPENT = "budget spent, in full trials"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
"""Dashes of our lines, of the peers' lines, and of peers after all colours are used."""


class Line(Protocol):
    """Fields of a sweep that the PNG needs."""

    @property
    def problem(self) -> str:
        """Name of the panel."""
        ...

    @property
    def contestant(self) -> str:
        """Name of the line."""
        ...

    @property
    def steps(self) -> Sequence[tuple[float, float]]:
        """Budget spent, and the hypervolume from then on."""
        ...


def write_picture(sweeps: Sequence[Line], budget: float, path: Path, spent: str = SPENT) -> None:
    """Draw all sweeps and write the file atomically; `spent` labels the horizontal axis."""
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
        style_axis(axis, spent, "hypervolume of finished trials")
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


def _draw(axis: Axes, sweeps: Sequence[Line], budget: float, color: str, dash: object) -> None:
    budgets = np.linspace(0, budget, GRID)
    interval = compute_median(
        np.array([evaluate_at_budgets(sweep.steps, budgets) for sweep in sweeps])
    )
    axis.fill_between(budgets, interval.low, interval.high, color=color, alpha=0.12, linewidth=0)
    name = sweeps[0].contestant
    axis.plot(budgets, interval.value, color=color, linestyle=dash, linewidth=1.4, label=name)
