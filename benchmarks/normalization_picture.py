"""PNG of `normalization.py`: fronts of the modes, with equal and with mixed ranges."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from normalization_report import Cell
from normalization_trials import MODES, RANGES

from gdpo_tune.core.files import write_atomically
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis

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
