"""The front against every pair of objectives as a still picture, for a page or a paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.text import CANDIDATE_COLORS
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.labels import place_labels
from gdpo_tune.figures.panels import (
    ATTAINED,
    PARENTS,
    Panel,
    build_panels,
    count_columns,
    list_legend,
    list_lines_to_parents,
)
from gdpo_tune.results.summary import FRONT_FILE

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

Symbol = str | tuple[int, int, int]
"""Marker of matplotlib."""
DPI = 200
SIDE = 3.7
"""Inches of a panel, with its axis titles."""
FONT_SIZE = 8.5
"""Size of labels and legend, in points."""
RADIUS = 5.0
"""Half the size of a mark with some space around it, in points."""
_TO_PARENTS: dict[str, Any] = {
    "color": CANDIDATE_COLORS["merge"],
    "linewidth": 0.6,
    "alpha": 0.2,
    "zorder": 1.5,
}


def write_front_png(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    path: Path | None = None,
    *,
    chosen: str | None = None,
) -> Path:
    """Draw the front and return the path of the file, which appears whole or not at all.

    Colours and symbols are those of the report: better is right and up, filled means several seeds.
    Default of `path`: `front.png` in the sweep's directory. `chosen` is the name of the
    candidate that a person picked.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or spec.directory / FRONT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    figure = draw_front(build_front(records, spec.list_objectives(), chosen), spec.name)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_atomically(target, picture.getvalue())
    return target


def draw_front_svg(front: Front, name: str) -> str:
    """Return the front as HTML without styles, which Jenkins' Content Security Policy forbids."""
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
    columns = count_columns(len(panels))
    rows = -(-len(panels) // columns)
    width = max(columns * SIDE + 0.3, 6.4)
    figure = Figure(figsize=(width, rows * SIDE + 1.15), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, front, panel)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle(
        f"{name}: Pareto front on test prompts", x=0.01, ha="left", size=12, color=style.INK
    )
    handles = _build_legend(front)
    if handles:
        count = min(len(handles), 4 if columns > 1 else 3)
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": count}
        figure.legend(handles=handles, fontsize=FONT_SIZE, frameon=False, **place)
    # Labels can be placed only once the layout has given the panels their size.
    figure.draw_without_rendering()
    for axis, panel in zip(axes, panels, strict=False):
        _annotate(axis, front, panel)
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


def _draw_panel(axis: Axes, front: Front, panel: Panel) -> None:
    axis.set_xlim(*panel.x.range)
    axis.set_ylim(*panel.y.range)
    style_axis(axis, panel.x.title, panel.y.title)
    stairs = [x for x, _ in panel.staircase], [y for _, y in panel.staircase]
    axis.plot(*stairs, color=style.FAINT, linewidth=1.2, zorder=1)
    for merge, parent in list_lines_to_parents(front, panel):
        axis.plot([merge[0], parent[0]], [merge[1], parent[1]], **_TO_PARENTS)
    if not front.configurations:
        axis.text(0.5, 0.5, "no trial is complete yet", color=style.MUTED, ha="center")
    for configuration in front.configurations:
        x, y = panel.x.get_estimate(configuration), panel.y.get_estimate(configuration)
        marker = _choose_marker(configuration)
        is_baseline = configuration.role in style.BASELINES
        if configuration.is_on_front or is_baseline:
            color = style.INK if is_baseline else marker["markeredgecolor"]
            bars: dict[str, Any] = {"ecolor": color, "elinewidth": 0.9, "alpha": 0.6, "fmt": "none"}
            axis.errorbar(x.mean, y.mean, xerr=x.se, yerr=y.se, zorder=2, **bars)
        axis.plot([x.mean], [y.mean], **marker)


def _choose_marker(configuration: Configuration) -> dict[str, Any]:
    """Return the mark of a configuration, as keywords of `Axes.plot`."""
    mark = style.get_configuration_mark(configuration)
    fill = style.PAPER if configuration.is_provisional else mark.color
    if configuration.role in style.BASELINES:
        _, baseline = style.BASELINES[configuration.role]
        if configuration.role == "published":
            return _make_marker(baseline.matplotlib, 13, fill, baseline.color, 0.9, 5)
        return _make_marker(baseline.matplotlib, 7.5, baseline.color, style.PAPER, 0.6, 4)
    if not configuration.feasible:
        return _make_marker("x", 3.5, mark.color, mark.color, 0.9, 2) | {"alpha": 0.55}
    if not configuration.is_on_front:
        return _make_marker(mark.matplotlib, 5, fill, mark.color, 0.9, 3) | {"alpha": 0.35}
    return _make_marker(mark.matplotlib, 7, fill, mark.color, 1.5, 4)


def _make_marker(
    symbol: Symbol, size: float, fill: str, edge: str, width: float = 1.0, order: int = 2
) -> dict[str, Any]:
    if isinstance(symbol, tuple):  # a star with so many points has less area than other symbols
        size *= 1.4
    return {
        "linestyle": "none",
        "marker": symbol,
        "markersize": size,
        "markerfacecolor": fill,
        "markeredgecolor": edge,
        "markeredgewidth": width,
        "zorder": order,
    }


def _annotate(axis: Axes, front: Front, panel: Panel) -> None:
    box = axis.get_window_extent()
    scale = 72 / axis.figure.dpi  # a point is 1/72 of an inch
    size = (box.width * scale, box.height * scale)
    offsets = place_labels(front, panel, size, FONT_SIZE, RADIUS)
    for (configuration, text), offset in zip(panel.labels, offsets, strict=True):
        axis.annotate(
            text,
            panel.get_point(configuration),
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=FONT_SIZE,
            color=style.INK,
            bbox={"facecolor": style.PAPER, "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.7, "shrinkB": 5},
            zorder=6,
        )


def _build_legend(front: Front) -> list[Line2D]:
    searched = [c for c in front.configurations if c.role not in style.BASELINES]
    handles = [_make_handle(n, m.matplotlib, m.color, m.color) for n, m in list_legend(front)]
    if any(c.is_on_front and c.is_provisional for c in front.configurations):
        handles.append(_make_handle("one seed, provisional", "o", style.PAPER, style.MUTED))
    if any(c.feasible and not c.is_on_front for c in searched):
        handles.append(_make_handle("dominated", "o", style.MUTED, style.MUTED, alpha=0.35))
    if any(not c.feasible for c in searched):
        handles.append(_make_handle("violates a constraint", "x", style.MUTED, style.MUTED))
    if front.members and len(front.objectives) > 1:
        handles.append(Line2D([], [], color=style.FAINT, label=ATTAINED))
    if any(member.role == "merge" for member in front.members):
        handles.append(Line2D([], [], label=PARENTS, **_TO_PARENTS))
    return handles


def _make_handle(label: str, symbol: Symbol, fill: str, edge: str, alpha: float = 1.0) -> Line2D:
    size = 11 if symbol == "*" else 7
    return Line2D([], [], label=label, alpha=alpha, **_make_marker(symbol, size, fill, edge))
