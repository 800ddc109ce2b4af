"""The front against every pair of objectives, as an interactive figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import (
    CANDIDATE_COLORS,
    abbreviate_parameter,
    format_count,
    format_estimate,
    format_parameter,
    get_mode,
)
from gdpo_tune.core.trials import Objective
from gdpo_tune.figures import style
from gdpo_tune.figures.labels import place_labels
from gdpo_tune.figures.layout import get_panel_size, make_panels, wrap_title
from gdpo_tune.figures.panels import (
    ATTAINED,
    PARENTS,
    Panel,
    build_panels,
    list_legend,
    list_lines_to_parents,
    list_modes,
)
from gdpo_tune.results.summary import name_configuration

if TYPE_CHECKING:
    from gdpo_tune.spec.model import Constraint

FONT_SIZE = 11
"""Size of the labels, in pixels."""
RADIUS = 8.0
"""Half the size of a mark with some space around it, in pixels."""
MOST_LINES = 9
"""Lines of a hover text: more would cover the next panel."""
MAX_LETTERS = 48
"""Letters in a line of parameters."""
_BOUND = {"color": style.MUTED, "width": 1.2, "dash": "dot"}
_STAIRCASE = {"color": style.FAINT, "width": 1.5}
_TO_PARENTS = {"color": style.fade(CANDIDATE_COLORS["merge"], 0.2), "width": 0.6}

Texts = Mapping[str, str]
"""Name of a configuration -> its hover text."""


def draw_pairs(
    front: Front,
    constraints: Mapping[str, Constraint] | None = None,
    dimensions: Sequence[str] | None = None,
) -> go.Figure:
    """Draw a panel for each pair of objectives; better is right and up in each.

    Filled points are means over several seeds, hollow ones have one seed; dominated points are
    faded; a small cross marks a configuration that violates a constraint. A thin line joins a merge
    on the front and each of its parents. A dotted line is one of `constraints` (metric -> bound) on
    an objective, where it lies within the panel. `dimensions` are the parameters that were
    searched; without them the hover text has all. The custom data of a point is its name.
    """
    panels = build_panels(front)
    texts = {
        c.name: describe_configuration(c, front.objectives, dimensions)
        for c in front.configurations
    }
    figure, cells = make_panels(len(panels))
    _add_legend(figure, front)
    for panel, cell in zip(panels, cells, strict=True):
        for trace in _trace_panel(front, panel, texts):
            figure.add_trace(trace, **cell)
        figure.update_xaxes(title_text=wrap_title(panel.x.title), range=panel.x.range, **cell)
        figure.update_yaxes(title_text=wrap_title(panel.y.title), range=panel.y.range, **cell)
        for annotation in _annotate(front, panel, get_panel_size(len(panels))):
            figure.add_annotation(**annotation, **cell)
        lines = (figure.add_vline, "x", panel.x), (figure.add_hline, "y", panel.y)
        for draw, where, axis in lines:
            bound = (constraints or {}).get(axis.objective.name) if axis.objective else None
            if bound is not None and axis.low < bound.limit < axis.high:
                draw(**{where: bound.limit}, line=_BOUND, layer="below", **cell)
    figure.update_layout(hovermode="closest")
    return figure


def describe_configuration(
    configuration: Configuration,
    objectives: Sequence[Objective],
    dimensions: Sequence[str] | None = None,
) -> str:
    """Return the hover text: name, standing, values on test prompts, and parameters.

    `dimensions` are the parameters to name; None names all. Lines are separated by `<br>`, as
    plotly wants it, and there are at most `MOST_LINES`; texts from outside are escaped.
    """
    lines = [name_configuration(configuration), describe_standing(configuration)]
    lines += [f"{o.name}: {format_estimate(configuration.mean[o.name])}" for o in objectives]
    if configuration.role != "untrained":
        params = configuration.params
        names = sorted(params) if dimensions is None else [n for n in dimensions if n in params]
        settings = [f"{abbreviate_parameter(n)} {format_parameter(params[n])}" for n in names]
        lines += wrap(", ".join(settings), MAX_LETTERS, break_long_words=False)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = ["\N{HORIZONTAL ELLIPSIS}"]
    title, *others = (escape(line) for line in lines)
    return "<br>".join([f"<b>{title}</b>", *others])


def describe_standing(configuration: Configuration) -> str:
    """Return whether a configuration is on the front, and on how many seeds that rests."""
    if configuration.role == "untrained":
        return "baseline, not trained"
    if not configuration.feasible:
        return "violates a constraint"
    if not configuration.can_be_on_front:
        return "unchanged: every gradient was 0"
    seeds = format_count(configuration.seeds, "seed")
    seeds += ", provisional" if configuration.is_provisional else ""
    place = "on the front" if configuration.is_on_front else "dominated"
    return f"{place} ({seeds}; P(front) = {configuration.probability:.2f})"


def _add_legend(figure: go.Figure, front: Front) -> None:
    """Add an entry for each kind of marks and lines, apart from the data: one plain symbol each."""
    for name, mark in list_legend(front):
        marker = {"symbol": mark.plotly, "color": mark.color, "size": 11}
        figure.add_scatter(
            x=[None], y=[None], mode="markers", marker=marker, name=name, legendgroup=name
        )
    lines = [(ATTAINED, _STAIRCASE)] if front.members and len(front.objectives) > 1 else []
    if any(member.role == "merge" for member in front.members):
        lines.append((PARENTS, _TO_PARENTS))
    for name, line in lines:
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=name, legendgroup=name)


def _trace_panel(front: Front, panel: Panel, texts: Texts) -> Iterable[go.Scatter]:
    """Yield traces from back to front: lines, faded points, members, baselines."""
    yield _trace_line(panel.staircase, _STAIRCASE, ATTAINED)
    lines = list_lines_to_parents(front, panel)
    if lines:  # one trace, which pairs of None interrupt
        points = [point for line in lines for point in (*line, (None, None))]
        yield _trace_line(points, _TO_PARENTS, PARENTS)
    groups = [(mode, style.get_mark(mode)) for mode in list_modes(front)]
    groups += style.CANDIDATES.values()
    for layer in ("violating", "dominated", "member"):
        for name, mark in groups:
            shown = [
                c for c in front.configurations if _get_group(c) == name and _get_layer(c) == layer
            ]
            bars = mark.color if layer == "member" else None
            if shown:
                marker = _make_marker(layer, mark, shown)
                yield _trace_points(panel, shown, texts, marker, name, bars)
    for baseline in front.baselines:
        yield _trace_baseline(panel, baseline, texts)


def _trace_line(
    points: Sequence[tuple[float | None, float | None]], line: dict[str, Any], group: str
) -> go.Scatter:
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="lines",
        line=line,
        hoverinfo="skip",
        showlegend=False,
        legendgroup=group,
    )


def _get_group(configuration: Configuration) -> str:
    """Return the legend's name of a configuration's mark; empty for a baseline."""
    if configuration.role in style.CANDIDATES:
        return style.CANDIDATES[configuration.role][0]
    return get_mode(configuration.params) if configuration.role == "search" else ""


def _get_layer(configuration: Configuration) -> str:
    if not configuration.feasible:
        return "violating"
    return "member" if configuration.is_on_front else "dominated"


def _make_marker(layer: str, mark: style.Mark, shown: Sequence[Configuration]) -> dict[str, Any]:
    if layer == "violating":
        line = {"color": style.fade(mark.color, 0.55), "width": 1.2}
        return {"symbol": "x-thin", "size": 6, "line": line}
    strong = layer == "member"
    color = mark.color if strong else style.fade(mark.color, 0.35)
    return {
        "symbol": mark.plotly,
        "size": 11 if strong else 8,
        "color": [_choose_fill(c, color) for c in shown],
        "line": {"color": color, "width": 2 if strong else 1.2},
    }


def _trace_baseline(panel: Panel, configuration: Configuration, texts: Texts) -> go.Scatter:
    name, mark = style.BASELINES[configuration.role]
    marker: dict[str, Any] = {"symbol": mark.plotly, "size": 10, "color": mark.color}
    if configuration.role == "published":
        color = style.get_mark(get_mode(configuration.params)).color
        line = {"color": mark.color, "width": 1.2}
        marker |= {"size": 15, "color": _choose_fill(configuration, color), "line": line}
    return _trace_points(panel, [configuration], texts, marker, name, bars=mark.color)


def _trace_points(
    panel: Panel,
    shown: Sequence[Configuration],
    texts: Texts,
    marker: dict[str, Any],
    group: str,
    bars: str | None = None,
) -> go.Scatter:
    """Return marks at the test means, with bars of one standard error if `bars` has a colour."""
    x = [panel.x.get_estimate(c) for c in shown]
    y = [panel.y.get_estimate(c) for c in shown]
    errors = {}
    if bars is not None:
        look = {"type": "data", "color": style.fade(bars, 0.55), "thickness": 1.2, "width": 0}
        errors = {
            "error_x": {"array": [e.se for e in x], **look},
            "error_y": {"array": [e.se for e in y], **look},
        }
    return go.Scatter(
        x=[estimate.mean for estimate in x],
        y=[estimate.mean for estimate in y],
        mode="markers",
        marker=marker,
        text=[texts[c.name] for c in shown],
        customdata=[c.name for c in shown],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        legendgroup=group,
        **errors,
    )


def _annotate(front: Front, panel: Panel, size: tuple[float, float]) -> list[dict[str, Any]]:
    points = [panel.get_point(configuration) for configuration, _ in panel.labels]
    offsets = place_labels(front, panel, size, FONT_SIZE, RADIUS)
    return [
        {
            "x": x,
            "y": y,
            "text": text.replace("\n", "<br>"),
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
        for (_, text), (x, y), (right, up) in zip(panel.labels, points, offsets, strict=True)
    ]


def _choose_fill(configuration: Configuration, color: str) -> str:
    """Return the fill of a mark: hollow while there is only one seed."""
    return style.PAPER if configuration.is_provisional else color
