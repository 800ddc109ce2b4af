"""The front against every pair of objectives as a PNG, for a page or a paper."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.files import write_whole
from gdpo_tune.core.formatting import mode_of
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.labels import arrange
from gdpo_tune.figures.pairs import grid_of
from gdpo_tune.figures.panels import Panel, panels
from gdpo_tune.results.summary import FRONT

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

DPI = 200
SIDE = 3.7
"""Inches of a panel, with its axis titles."""
FONT_SIZE = 8.5
"""Of labels and legend, in points."""
POINTS = 72
"""Points an inch: the unit of annotations."""


def write_front_png(
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    path: Path | None = None,
    *,
    chosen: int | None = None,
) -> Path:
    """Draw the front and return where the picture is; it appears whole or not at all.

    The encodings are those of the report: better is right and up, filled means several seeds.

    Args:
        spec: the sweep.
        records: all its trials; there may be none.
        path: default: `front.png` in the sweep's folder.
        chosen: number of the trial that a person chose.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or spec.directory / FRONT
    target.parent.mkdir(parents=True, exist_ok=True)
    figure = front_picture(build_front(records, spec.objective_list(), chosen), spec.name)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=style.PAPER)
    write_whole(target, picture.getvalue())
    return target


def front_picture(front: Front, name: str) -> Figure:
    """The figure itself: a panel for each pair of objectives, a legend below."""
    drawn = panels(front)
    grid = grid_of(len(drawn))
    width = max(grid.columns * SIDE + 0.3, 6.4)
    figure = Figure(figsize=(width, grid.rows * SIDE + 1.15), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(grid.rows, grid.columns, squeeze=False).ravel()
    for axis, panel in zip(axes, drawn, strict=False):
        _draw(axis, front, panel)
    for axis in axes[len(drawn) :]:
        axis.remove()
    figure.suptitle(
        f"{name}: Pareto front on test prompts", x=0.01, ha="left", size=12, color=style.INK
    )
    handles = _legend(front)
    if handles:
        columns = min(len(handles), 4 if grid.columns > 1 else 3)
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            fontsize=FONT_SIZE,
        )
    # Text can be placed only once the layout has given the panels their size.
    figure.draw_without_rendering()
    for axis, panel in zip(axes, drawn, strict=False):
        _annotate(axis, front, panel)
    return figure


def dress(axis: Axes, across: str, up: str) -> None:
    """Give an axis its titles and the look that all PNGs share."""
    axis.set_xlabel(across, color=style.INK)
    axis.set_ylabel(up, color=style.INK)
    axis.grid(color=style.GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=style.MUTED, labelsize=FONT_SIZE)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(style.FAINT)


def _draw(axis: Axes, front: Front, panel: Panel) -> None:
    axis.set_xlim(*panel.x.range)
    axis.set_ylim(*panel.y.range)
    dress(axis, panel.x.title, panel.y.title)
    axis.plot(
        [x for x, _ in panel.staircase],
        [y for _, y in panel.staircase],
        color=style.FAINT,
        linewidth=1.2,
        zorder=1,
    )
    if not front.configurations:
        axis.text(0.5, 0.5, "no trial is complete yet", color=style.MUTED, ha="center")
    for configuration in front.configurations:
        _mark(axis, panel, configuration)


def _mark(axis: Axes, panel: Panel, configuration: Configuration) -> None:
    x, y = panel.x.of(configuration), panel.y.of(configuration)
    look = _look(configuration)
    if configuration.on_front or configuration.role != "search":
        axis.errorbar(
            x.mean,
            y.mean,
            xerr=x.se,
            yerr=y.se,
            ecolor=_bar_color(configuration),
            elinewidth=0.9,
            alpha=0.6,
            fmt="none",
            zorder=2,
        )
    axis.plot([x.mean], [y.mean], linestyle="none", zorder=look.pop("zorder"), **look)


def _bar_color(configuration: Configuration) -> str:
    if configuration.role != "search":
        return style.INK
    return style.mark_of(mode_of(configuration.params)).color


def _look(configuration: Configuration) -> dict[str, Any]:
    """Marker of one configuration, as keywords of `Axes.plot`."""
    mark = style.mark_of(mode_of(configuration.params))
    fill = style.PAPER if configuration.provisional else mark.color
    if configuration.role == "untrained":
        return _marker(style.UNTRAINED.matplotlib, 7.5, style.INK, style.PAPER, 0.6, 4)
    if configuration.role == "published":
        return _marker(style.PUBLISHED.matplotlib, 13, fill, style.INK, 0.9, 5)
    if not configuration.feasible:
        return _marker("x", 3.5, mark.color, mark.color, 0.9, 2) | {"alpha": 0.55}
    if not configuration.on_front:
        return _marker(mark.matplotlib, 5, fill, mark.color, 0.9, 3) | {"alpha": 0.35}
    return _marker(mark.matplotlib, 7, fill, mark.color, 1.5, 4)


def _marker(
    symbol: str, size: float, fill: str, edge: str, width: float, order: int
) -> dict[str, Any]:
    return {
        "marker": symbol,
        "markersize": size,
        "markerfacecolor": fill,
        "markeredgecolor": edge,
        "markeredgewidth": width,
        "zorder": order,
    }


def _annotate(axis: Axes, front: Front, panel: Panel) -> None:
    box = axis.get_window_extent()
    scale = POINTS / axis.figure.dpi
    size = (box.width * scale, box.height * scale)

    def points(configuration: Configuration) -> tuple[float, float]:
        x, y = panel.x.of(configuration).mean, panel.y.of(configuration).mean
        return panel.x.place(x) * size[0], panel.y.place(y) * size[1]

    obstacles = [points(configuration) for configuration in front.configurations]
    anchors = [points(configuration) for configuration, _ in panel.labels]
    texts = [text for _, text in panel.labels]
    offsets = arrange(anchors, texts, obstacles, size, FONT_SIZE)
    for (configuration, text), offset in zip(panel.labels, offsets, strict=True):
        axis.annotate(
            text,
            (panel.x.of(configuration).mean, panel.y.of(configuration).mean),
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=FONT_SIZE,
            color=style.INK,
            arrowprops={"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.7, "shrinkB": 5},
            zorder=6,
        )


def _legend(front: Front) -> list[Line2D]:
    searched = [c for c in front.configurations if c.role == "search"]
    handles = [
        _handle(mode, style.mark_of(mode), style.mark_of(mode).color)
        for mode in sorted({mode_of(c.params) for c in searched})
    ]
    roles = {c.role for c in front.baselines}
    if "published" in roles:
        handles.append(_handle("published weights", style.PUBLISHED, style.MUTED))
    if "untrained" in roles:
        handles.append(_handle("untrained policy", style.UNTRAINED, style.INK))
    if any(c.on_front and c.provisional for c in front.configurations):
        circle = style.Mark(style.MUTED, "circle", "o")
        handles.append(_handle("one seed, provisional", circle, style.PAPER))
    if any(c.feasible and not c.on_front for c in searched):
        handles.append(
            _handle("dominated", style.Mark(style.MUTED, "circle", "o"), style.MUTED, 0.35)
        )
    if any(not c.feasible for c in searched):
        handles.append(
            _handle("breaks a constraint", style.Mark(style.MUTED, "x", "x"), style.MUTED)
        )
    if front.members and len(front.objectives) > 1:
        handles.append(Line2D([], [], color=style.FAINT, label="attained in these two objectives"))
    return handles


def _handle(label: str, mark: style.Mark, fill: str, alpha: float = 1.0) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=mark.matplotlib,
        markersize=11 if mark.matplotlib == style.PUBLISHED.matplotlib else 7,
        markerfacecolor=fill,
        markeredgecolor=mark.color,
        alpha=alpha,
        label=label,
    )
