"""PNG of `fronts.py`: a panel for each task, thin lines for its seeds, strong ones for medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gdpo_tune.core.files import write_atomically
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, FONT_SIZE, SIDE, style_axis

COLORS = [mark.color for mark in style.MODES.values()]


def write_fronts_picture(
    figures: Sequence[Mapping[str, Any]], names: Sequence[str], shares: Sequence[float], path: Path
) -> None:
    """Draw the hypervolume of each contestant at each share of the budget; write it atomically.

    A dotted line marks where the last contestant ends, in the median over seeds.
    """
    tasks = list(dict.fromkeys(figure["task"] for figure in figures))
    figure = Figure(figsize=(len(tasks) * 1.1 * SIDE, SIDE + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        for name, color in zip(names, COLORS, strict=False):
            volumes = np.array([f[name]["hypervolume"] for f in figures if f["task"] == task])
            axis.plot(shares, volumes.T, color=color, linewidth=0.7, alpha=0.45)
            middle = np.median(volumes, axis=0)
            axis.plot(shares, middle, color=color, linewidth=2, marker="o", label=name)
            if name == names[-1]:
                axis.axhline(middle[-1], color=color, linewidth=1, linestyle=":")
        axis.set_title(task, size=10, color=style.INK)
        axis.set_xticks(shares, [f"{share:.2f}" for share in shares])
        style_axis(axis, "share of the budget", "hypervolume, fresh test seeds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=FONT_SIZE
    )
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(path, picture.getvalue())
