"""The front against every pair of objectives, as an interactive figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import CANDIDATE_COLORS, format_count, format_estimate
from gdpo_tune.core.trials import Objective
from gdpo_tune.figures import front_panels, style
from gdpo_tune.figures.layout import get_panel_size, make_panels, wrap_title
from gdpo_tune.results.wording import describe_parameters, name_configuration
from gdpo_tune.spec.model import Constraint

FONT_SIZE = 11
"""Size of the labels, in pixels."""
RADIUS = 8.0
"""Half the size of a mark with some space around it, in pixels."""
MAX_LINES = 9
"""Lines of a hover text: more would cover the next panel."""
MAX_LETTERS = 48
"""Letters in a line of parameters."""
BOUND = {"color": style.MUTED, "width": 1.2, "dash": "dot"}
LINES = {
    front_panels.ATTAINED: {"color": style.FAINT, "width": 1.5},
    front_panels.PARENTS: {"color": style.fade(CANDIDATE_COLORS["merge"], 0.2), "width": 0.6},
}
LABEL: dict[str, Any] = {
    "font": {"size": FONT_SIZE, "color": style.INK},
    "arrowwidth": 1,
    "arrowcolor": style.MUTED,
    "arrowhead": 0,
    "standoff": 8,
    "bgcolor": "rgba(255,255,255,0.8)",
    "borderpad": 1,
}


def draw_pairs(
    front: Front,
    constraints: Mapping[str, Constraint] | None = None,
    dimensions: Sequence[str] | None = None,
) -> go.Figure:
    """Draw `build_panels`; the hover text names the parameters `dimensions`, else all.

    The custom data of a point is the name of its configuration.
    """
    panels = front_panels.build_panels(front, constraints)
    texts = {
        c.name: describe_configuration(c, front.objectives, dimensions)
        for c in front.configurations
    }
    figure, cells = make_panels(len(panels))
    for name, mark in front_panels.list_legend(front):
        marker = {"symbol": mark.plotly, "color": mark.color, "size": 11}
        figure.add_scatter(
            x=[None], y=[None], mode="markers", marker=marker, name=name, legendgroup=name
        )
    for name in front_panels.list_line_legend(front):
        figure.add_scatter(
            x=[None], y=[None], mode="lines", line=LINES[name], name=name, legendgroup=name
        )
    for panel, cell in zip(panels, cells, strict=True):
        figure.add_traces([*_trace_panel(panel, texts)], rows=cell["row"], cols=cell["col"])
        figure.update_xaxes(title_text=wrap_title(panel.x.title), range=panel.x.range, **cell)
        figure.update_yaxes(title_text=wrap_title(panel.y.title), range=panel.y.range, **cell)
        offsets = front_panels.place_labels(panel, get_panel_size(len(panels)), FONT_SIZE, RADIUS)
        for (point, text), (right, up) in zip(panel.labels, offsets, strict=True):
            text = text.replace("\n", "<br>")
            x, y = point.xy
            figure.add_annotation(x=x, y=y, text=text, ax=right, ay=-up, **LABEL, **cell)
        for side, limit in panel.bounds:
            draw = figure.add_vline if side == "x" else figure.add_hline
            draw(**{side: limit}, line=BOUND, layer="below", **cell)
    figure.update_layout(hovermode="closest")
    return figure


def describe_configuration(
    configuration: Configuration,
    objectives: Sequence[Objective],
    dimensions: Sequence[str] | None = None,
) -> str:
    """Return the hover text: at most `MAX_LINES` escaped lines, separated by `<br>`."""
    lines = [name_configuration(configuration), describe_standing(configuration)]
    lines += [f"{o.name}: {format_estimate(configuration.mean[o.name])}" for o in objectives]
    if not configuration.is_initial:
        params = configuration.params
        names = sorted(params) if dimensions is None else dimensions
        settings = describe_parameters(params, names)
        lines += wrap(settings, MAX_LETTERS, break_long_words=False)
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = ["\N{HORIZONTAL ELLIPSIS}"]
    title, *others = (escape(line) for line in lines)
    return "<br>".join([f"<b>{title}</b>", *others])


def describe_standing(configuration: Configuration) -> str:
    """Return whether a configuration is on the front, and on how many seeds that rests."""
    if configuration.is_initial:
        how = "not trained" if configuration.role == "untrained" else "trained on demonstrations"
        return f"baseline, {how}"
    if not configuration.feasible:
        return "violates a constraint"
    if not configuration.can_be_on_front:
        return "unchanged: every gradient was 0"
    seeds = format_count(configuration.seeds, "seed")
    seeds += ", provisional" if configuration.is_provisional else ""
    place = "on the front" if configuration.is_on_front else "dominated"
    return f"{place} ({seeds}; P(front) = {configuration.probability:.2f})"


def _trace_panel(panel: front_panels.Panel, texts: Mapping[str, str]) -> Iterator[go.Scatter]:
    """Yield traces from back to front: lines, faded points, members, baselines."""
    yield _trace_line(panel.staircase, front_panels.ATTAINED)
    if panel.parents:  # one trace, which pairs of None interrupt
        yield _trace_line(
            [p for line in panel.parents for p in (*line, (None, None))], front_panels.PARENTS
        )
    candidates = [name for name, _ in style.CANDIDATES.values()]
    searched = [p for p in panel.points if p.configuration.role not in style.BASELINES]
    groups = [*sorted({p.group for p in searched} - {*candidates}), *candidates]
    for layer in ("violating", "dominated", "member"):
        for group in groups:
            if shown := [p for p in searched if (p.layer, p.group) == (layer, group)]:
                yield _trace_points(shown, texts)
    for point in panel.points:
        if point.configuration.role in style.BASELINES:
            yield _trace_points([point], texts)


def _trace_line(points: Sequence[tuple[float | None, float | None]], name: str) -> go.Scatter:
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="lines",
        line=LINES[name],
        hoverinfo="skip",
        showlegend=False,
        legendgroup=name,
    )


def _trace_points(shown: Sequence[front_panels.Point], texts: Mapping[str, str]) -> go.Scatter:
    first, look = shown[0], front_panels.LOOKS[shown[0].layer]
    color = first.mark.color if look.opacity == 1 else style.fade(first.mark.color, look.opacity)
    marker: dict[str, Any] = {"symbol": first.mark.plotly, "size": look.pixels}
    if first.layer == "violating":
        marker = {"symbol": "x-thin", "size": look.pixels}
    elif first.layer in style.BASELINES:
        marker["color"] = first.fill
    else:
        marker["color"] = [style.PAPER if p.fill == style.PAPER else color for p in shown]
    if look.edge_pixels:
        marker["line"] = {"color": color, "width": look.edge_pixels}
    errors: dict[str, Any] = {}
    if first.has_bars:
        bars = {"type": "data", "color": style.fade(first.mark.color, 0.55), "thickness": 1.2}
        errors["error_x"] = {"array": [p.x.se for p in shown], **bars, "width": 0}
        errors["error_y"] = {"array": [p.y.se for p in shown], **bars, "width": 0}
    return go.Scatter(
        x=[p.x.mean for p in shown],
        y=[p.y.mean for p in shown],
        mode="markers",
        marker=marker,
        text=[texts[p.configuration.name] for p in shown],
        customdata=[p.configuration.name for p in shown],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        legendgroup=first.group,
        **errors,
    )
