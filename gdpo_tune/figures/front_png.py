"""The front against every pair of objectives as a still picture, for a page or a paper."""

from __future__ import annotations

import re
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.text import CANDIDATE_COLORS
from gdpo_tune.figures import style
from gdpo_tune.figures.front_panels import (
    ATTAINED,
    LOOKS,
    PARENTS,
    Panel,
    build_panels,
    list_legend,
    list_line_legend,
    place_labels,
)
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import FRONT_FILE

Symbol = str | tuple[int, int, int]
"""Marker of matplotlib."""
DPI = 200
SIDE = 3.7
"""Inches of a panel, with its axis titles."""
FONT_SIZE = 8.5
"""Size of labels and legend, in points."""
RADIUS = 5.0
"""Half the size of a mark with some space around it, in points."""
BOX = {"facecolor": style.PAPER, "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
ARROW = {"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.7, "shrinkB": 5}
"""Look of labels."""
LINES: dict[str, dict[str, Any]] = {
    ATTAINED: {"color": style.FAINT},
    PARENTS: {"color": CANDIDATE_COLORS["merge"], "linewidth": 0.6, "alpha": 0.2, "zorder": 1.5},
}


def write_front_png(sweep: Sweep, path: Path | None = None) -> Path:
    """Draw `front.png` in the sweep's directory, or `path`, whole or not; return the path."""
    target = path or sweep.spec.directory / FRONT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    figure = draw_front(sweep.front, sweep.spec.name)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(target, picture.getvalue())
    return target


def draw_front_svg(front: Front, name: str) -> str:
    """Draw the front as HTML without styles, which Jenkins' Content Security Policy forbids."""
    picture = StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):  # equal fronts, equal files
        draw_front(front, name).savefig(picture, format="svg", metadata={"Date": None})
    text = '<svg role="img" aria-label="Pareto front" stroke-linejoin="round" '
    text += picture.getvalue().partition("<svg ")[2]
    needless = r'<(metadata|style).*?</\1>|<!--.*?-->| (id="[\w.]+_\d+"|xmlns[:\w]*=".*?")'
    text = re.sub(r"\s+", " ", re.sub(needless, "", text, flags=re.DOTALL))
    text = re.sub(r"(\d\d\.\d)\d+", r"\1", text)
    styles = re.compile(r'style="(.*?);?"')
    return styles.sub(lambda m: re.sub(r"([\w-]+): (.*?)(;|$)", r'\1="\2"', m[1]), text)


def draw_front(front: Front, name: str) -> Figure:
    """Draw a panel for each pair of objectives, and a legend below."""
    panels = build_panels(front)
    columns = style.count_columns(len(panels))
    rows = -(-len(panels) // columns)
    width = max(columns * SIDE + 0.3, 6.4)
    figure = Figure(figsize=(width, rows * SIDE + 1.15), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle(
        f"{name}: Pareto front on test prompts", x=0.01, ha="left", size=12, color=style.INK
    )
    if handles := _build_legend(front, panels[0]):
        count = min(len(handles), 4 if columns > 1 else 3)
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": count}
        figure.legend(handles=handles, fontsize=FONT_SIZE, frameon=False, **place)
    # Labels can be placed only once the layout has given the panels their size.
    figure.draw_without_rendering()
    for axis, panel in zip(axes, panels, strict=False):
        box = axis.get_window_extent()
        scale = 72 / axis.figure.dpi  # a point is 1/72 of an inch
        size = (box.width * scale, box.height * scale)
        offsets = place_labels(panel, size, FONT_SIZE, RADIUS)
        for (point, text), offset in zip(panel.labels, offsets, strict=True):
            axis.annotate(
                text,
                point.xy,
                xytext=offset,
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=FONT_SIZE,
                color=style.INK,
                bbox=BOX,
                arrowprops=ARROW,
                zorder=6,
            )
    return figure


def style_axis(axis: Axes, across: str, up: str) -> None:
    """Give an axis its titles and the look that all PNGs share."""
    axis.set_xlabel(across, color=style.INK)
    axis.set_ylabel(up, color=style.INK)
    axis.grid(color=style.GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=style.MUTED, labelsize=FONT_SIZE)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(style.FAINT)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    axis.set_xlim(*panel.x.range)
    axis.set_ylim(*panel.y.range)
    style_axis(axis, panel.x.title, panel.y.title)
    x, y = [x for x, _ in panel.staircase], [y for _, y in panel.staircase]
    axis.plot(x, y, color=style.FAINT, linewidth=1.2, zorder=1)
    for merge, parent in panel.parents:
        axis.plot([merge[0], parent[0]], [merge[1], parent[1]], **LINES[PARENTS])
    if not panel.points:
        axis.text(0.5, 0.5, "no trial is complete yet", color=style.MUTED, ha="center")
    for point in panel.points:
        (x, y), color = point.xy, point.mark.color
        if point.has_bars:
            bars: dict[str, Any] = {"ecolor": color, "elinewidth": 0.9, "alpha": 0.6, "fmt": "none"}
            axis.errorbar(x, y, xerr=point.x.se, yerr=point.y.se, zorder=2, **bars)
        edge = style.PAPER if point.configuration.is_initial else color
        symbol = "x" if point.layer == "violating" else point.mark.matplotlib
        look, shape = LOOKS[point.layer], (symbol, point.fill, edge)
        marker = _make_marker(*shape, look.points, look.edge_points, look.opacity)
        axis.plot([x], [y], zorder=look.order, **marker)


def _make_marker(
    symbol: Symbol, fill: str, edge: str, size: float, width: float = 1.0, opacity: float = 1.0
) -> dict[str, Any]:
    # A star with so many points has less area than other symbols.
    size *= 1.4 if isinstance(symbol, tuple) else 1.0
    return {
        "linestyle": "none",
        "marker": symbol,
        "markersize": size,
        "markerfacecolor": fill,
        "markeredgecolor": edge,
        "markeredgewidth": width,
        "alpha": opacity,
    }


def _build_legend(front: Front, panel: Panel) -> list[Line2D]:
    layers = {point.layer for point in panel.points}
    marks = [(n, m.matplotlib, m.color, m.color, 1.0) for n, m in list_legend(front)]
    if any(c.is_on_front and c.is_provisional for c in front.configurations):
        marks.append(("one seed, provisional", "o", style.PAPER, style.MUTED, 1.0))
    if "dominated" in layers:
        marks.append(("dominated", "o", style.MUTED, style.MUTED, LOOKS["dominated"].opacity))
    if "violating" in layers:
        marks.append(("violates a constraint", "x", style.MUTED, style.MUTED, 1.0))
    handles = [
        Line2D(
            [], [], label=name, **_make_marker(symbol, fill, edge, 7 + 4 * (symbol == "*"), 1.0, a)
        )
        for name, symbol, fill, edge, a in marks
    ]
    return handles + [Line2D([], [], label=name, **LINES[name]) for name in list_line_legend(front)]
