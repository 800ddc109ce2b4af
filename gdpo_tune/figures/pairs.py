"""The front against every pair of objectives, as an interactive picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import mode_of
from gdpo_tune.figures import style
from gdpo_tune.figures.hover import hover_text
from gdpo_tune.figures.labels import arrange
from gdpo_tune.figures.layout import base_layout
from gdpo_tune.figures.panels import Panel, panels

if TYPE_CHECKING:
    from gdpo_tune.spec.model import Constraint

WIDTH = 1240
"""Pixels that the report is wide; labels are placed for this width."""
MARGINS = {"l": 64, "r": 16, "t": 64, "b": 56}
FONT_SIZE = 11
"""Of the labels, in pixels."""
GAP = 0.075
"""Share of the width between two panels."""


@dataclass(frozen=True)
class Grid:
    """How many panels stand side by side and how large one is, in pixels."""

    columns: int
    rows: int
    width: float
    height: float


def pairs_figure(front: Front, constraints: Mapping[str, Constraint] | None = None) -> go.Figure:
    """Panels of every pair of objectives; better is right and up in each.

    Filled points are means over several seeds, hollow ones have one seed; dominated points are
    faded; a small cross marks a configuration that breaks a constraint. A dotted line is a
    constraint on an objective, where it lies within the panel.

    Args:
        front: what is drawn.
        constraints: metric -> bound.
    """
    drawn = panels(front)
    grid = grid_of(len(drawn))
    figure: go.Figure = make_subplots(
        rows=grid.rows,
        cols=grid.columns,
        horizontal_spacing=GAP if grid.columns > 1 else 0.0,
        vertical_spacing=0.16 if grid.rows > 1 else 0.0,
    )
    _add_legend(figure, front)
    for index, panel in enumerate(drawn):
        cell: dict[str, Any] = {"row": index // grid.columns + 1, "col": index % grid.columns + 1}
        for trace in _traces(front, panel):
            figure.add_trace(trace, **cell)
        figure.update_xaxes(title_text=panel.x.title, range=panel.x.range, **cell)
        figure.update_yaxes(title_text=panel.y.title, range=panel.y.range, **cell)
        for annotation in _annotations(front, panel, grid):
            figure.add_annotation(**annotation, **cell)
        for draw, axis in ((figure.add_vline, panel.x), (figure.add_hline, panel.y)):
            bound = (constraints or {}).get(axis.objective.name) if axis.objective else None
            if bound is not None and axis.low < bound.bound < axis.high:
                where = "x" if axis is panel.x else "y"
                draw(**{where: bound.bound}, line=_BOUND, layer="below", **cell)
    figure.update_layout(
        **base_layout(grid.rows * (grid.height + 84) + 60, MARGINS), hovermode="closest"
    )
    return figure


def grid_of(count: int) -> Grid:
    """The grid for `count` panels, at most three side by side."""
    columns = min(count, 3)
    inner = WIDTH - MARGINS["l"] - MARGINS["r"]
    width = inner * (1 - GAP * (columns - 1)) / columns
    return Grid(columns, math.ceil(count / columns), width, min(width, 430.0))


def _add_legend(figure: go.Figure, front: Front) -> None:
    """One entry a mode and a baseline, apart from the data so that each has one plain symbol."""
    modes = sorted({mode_of(c.params) for c in front.configurations if _is_searched(c)})
    entries = [(mode, mode, style.mark_of(mode)) for mode in modes]
    roles = {c.role for c in front.baselines}
    if "published" in roles:
        entries.append(("published", "published weights", style.PUBLISHED))
    if "untrained" in roles:
        entries.append(("untrained", "untrained policy", style.UNTRAINED))
    for group, name, mark in entries:
        marker = {"symbol": mark.plotly, "color": mark.color, "size": 11}
        figure.add_trace(
            go.Scatter(
                x=[None], y=[None], mode="markers", marker=marker, name=name, legendgroup=group
            )
        )
    if front.members and len(front.objectives) > 1:
        figure.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="lines",
                line=_STAIRCASE,
                name="attained in these two objectives",
                legendgroup="staircase",
            )
        )


_BOUND = {"color": style.MUTED, "width": 1.2, "dash": "dot"}
_STAIRCASE = {"color": style.FAINT, "width": 1.5}


def _traces(front: Front, panel: Panel) -> Iterable[go.Scatter]:
    """From the back to the front: the attained border, faded points, members, baselines."""
    yield go.Scatter(
        x=[x for x, _ in panel.staircase],
        y=[y for _, y in panel.staircase],
        mode="lines",
        line=_STAIRCASE,
        hoverinfo="skip",
        showlegend=False,
        legendgroup="staircase",
    )
    searched = [c for c in front.configurations if _is_searched(c)]
    modes = sorted({mode_of(c.params) for c in searched})
    for layer in (_broken, _dominated, _members):
        for mode in modes:
            of_mode = [c for c in searched if mode_of(c.params) == mode]
            yield layer(front, panel, mode, of_mode)
    for baseline in front.baselines:
        yield _baseline(front, panel, baseline)


def _broken(
    front: Front, panel: Panel, mode: str, configurations: Sequence[Configuration]
) -> go.Scatter:
    chosen = [c for c in configurations if not c.feasible]
    color = style.faded(style.mark_of(mode).color, 0.55)
    marker = {"symbol": "x-thin", "size": 6, "line": {"color": color, "width": 1.2}}
    return _points(front, panel, chosen, marker, mode)


def _dominated(
    front: Front, panel: Panel, mode: str, configurations: Sequence[Configuration]
) -> go.Scatter:
    chosen = [c for c in configurations if c.feasible and not c.on_front]
    mark = style.mark_of(mode)
    marker = {
        "symbol": mark.plotly,
        "size": 8,
        "color": [_fill(c, style.faded(mark.color, 0.35)) for c in chosen],
        "line": {"color": style.faded(mark.color, 0.35), "width": 1.2},
    }
    return _points(front, panel, chosen, marker, mode)


def _members(
    front: Front, panel: Panel, mode: str, configurations: Sequence[Configuration]
) -> go.Scatter:
    chosen = [c for c in configurations if c.on_front]
    mark = style.mark_of(mode)
    marker = {
        "symbol": mark.plotly,
        "size": 11,
        "color": [_fill(c, mark.color) for c in chosen],
        "line": {"color": mark.color, "width": 2},
        "opacity": 1,
    }
    return _points(front, panel, chosen, marker, mode, bars=mark.color)


def _baseline(front: Front, panel: Panel, configuration: Configuration) -> go.Scatter:
    if configuration.role == "untrained":
        marker: dict[str, Any] = {
            "symbol": style.UNTRAINED.plotly,
            "size": 10,
            "color": style.UNTRAINED.color,
        }
        return _points(front, panel, [configuration], marker, "untrained", bars=style.INK)
    color = style.mark_of(mode_of(configuration.params)).color
    marker = {
        "symbol": style.PUBLISHED.plotly,
        "size": 15,
        "color": _fill(configuration, color),
        "line": {"color": style.INK, "width": 1.2},
    }
    return _points(front, panel, [configuration], marker, "published", bars=style.INK)


def _points(
    front: Front,
    panel: Panel,
    chosen: Sequence[Configuration],
    marker: dict[str, Any],
    group: str,
    bars: str | None = None,
) -> go.Scatter:
    """Markers at the test means, with error bars of one standard error if `bars` has a colour."""
    x, y = [panel.x.of(c) for c in chosen], [panel.y.of(c) for c in chosen]
    errors = {}
    if bars is not None:
        look = {"color": style.faded(bars, 0.55), "thickness": 1.2, "width": 0}
        errors = {
            "error_x": {"type": "data", "array": [e.se for e in x], **look},
            "error_y": {"type": "data", "array": [e.se for e in y], **look},
        }
    return go.Scatter(
        x=[estimate.mean for estimate in x],
        y=[estimate.mean for estimate in y],
        mode="markers",
        marker=marker,
        text=[hover_text(c, front.objectives) for c in chosen],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        legendgroup=group,
        **errors,
    )


def _annotations(front: Front, panel: Panel, grid: Grid) -> list[dict[str, Any]]:
    """The knee and the extremes, pointed out by name."""

    def pixels(configuration: Configuration) -> tuple[float, float]:
        x, y = panel.x.of(configuration).mean, panel.y.of(configuration).mean
        return panel.x.place(x) * grid.width, panel.y.place(y) * grid.height

    obstacles = [pixels(configuration) for configuration in front.configurations]
    anchors = [pixels(configuration) for configuration, _ in panel.labels]
    texts = [text for _, text in panel.labels]
    offsets = arrange(anchors, texts, obstacles, (grid.width, grid.height), FONT_SIZE)
    return [
        {
            "x": panel.x.of(configuration).mean,
            "y": panel.y.of(configuration).mean,
            "text": text,
            "ax": right,
            "ay": -up,
            "font": {"size": FONT_SIZE, "color": style.INK},
            "arrowwidth": 1,
            "arrowcolor": style.MUTED,
            "arrowhead": 0,
            "standoff": 8,
            "bgcolor": "rgba(255,255,255,0.8)",
            "borderpad": 1,
        }
        for (configuration, text), (right, up) in zip(panel.labels, offsets, strict=True)
    ]


def _is_searched(configuration: Configuration) -> bool:
    return configuration.role == "search"


def _fill(configuration: Configuration, color: str) -> str:
    """Hollow while there is one seed only."""
    return style.PAPER if configuration.provisional else color
