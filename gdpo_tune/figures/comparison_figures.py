"""Figures of a comparison: the points of both sides, and which one has the better values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import plotly.graph_objects as go

from gdpo_tune.analysis.comparison import Arm, Comparison
from gdpo_tune.analysis.pareto import Floats, mark_front
from gdpo_tune.core.text import abbreviate_parameter
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout, make_panels, wrap_title

LEFT = style.Mark("#0072b2", "circle", "o")
RIGHT = style.Mark("#d55e00", "square", "s")


def draw_sides(comparison: Comparison) -> go.Figure:
    """Draw a panel per pair of objectives with the points of both sides."""
    pairs = list(combinations(range(len(comparison.left.objectives)), 2))
    figure, cells = make_panels(len(pairs))
    sides = (comparison.left, comparison.right)
    for pair, cell in zip(pairs, cells, strict=True):
        goals = [comparison.left.objectives[index] for index in pair]
        signs = [-1.0 if goal.direction == "maximize" else 1.0 for goal in goals]
        traces: list[go.Scatter] = []
        for side, mark in zip(sides, (LEFT, RIGHT), strict=True):
            points = side.points[:, list(pair)]
            traces += _trace_side(side, points, signs, mark, legend=cell == cells[0])
        figure.add_traces(traces, rows=cell["row"], cols=cell["col"])
        for update, goal in zip((figure.update_xaxes, figure.update_yaxes), goals, strict=True):
            towards = "reversed" if goal.direction == "minimize" else True  # to better values
            update(title_text=wrap_title(style.title_axis(goal)), autorange=towards, **cell)
    return figure


def draw_superiority(comparison: Comparison) -> go.Figure:
    """Draw for each objective how often a configuration of the left side beats one of the right."""
    names = list(comparison.probability_of_superiority)[::-1]
    effects = [comparison.probability_of_superiority[name] for name in names]
    figure = go.Figure(
        go.Scatter(
            x=[effect.value for effect in effects],
            y=[abbreviate_parameter(name) for name in names],
            mode="markers",
            marker={"color": style.INK, "size": 10},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [effect.interval.high - effect.value for effect in effects],
                "arrayminus": [effect.value - effect.interval.low for effect in effects],
                "color": style.INK,
                "thickness": 1.6,
            },
            text=[f"corrected p = {effect.corrected:.3f}" for effect in effects],
            hovertemplate="%{y}: %{x:.0%}<br>%{text}<extra></extra>",
        )
    )
    figure.add_vline(x=0.5, line={"color": style.MUTED, "width": 1, "dash": "dash"})
    figure.update_layout(**make_layout(110 + 46 * len(names), t=16, b=56))
    left, right = comparison.left.name, comparison.right.name
    figure.update_xaxes(
        title_text=f"pairs in which {left} beats {right}", tickformat=".0%", range=[0, 1]
    )
    return figure


def _trace_side(
    side: Arm, losses: Floats, signs: Sequence[float], mark: style.Mark, *, legend: bool
) -> list[go.Scatter]:
    """Return one side's points, losses `[T, 2]`, and the line along its best ones."""
    points = losses[np.isfinite(losses).all(axis=1)]
    is_best = mark_front(points)
    corners = points[is_best][np.argsort(points[is_best][:, 0])]
    return [
        go.Scatter(
            x=(points[:, 0] * signs[0]).tolist(),
            y=(points[:, 1] * signs[1]).tolist(),
            mode="markers",
            marker={
                "symbol": mark.plotly,
                "size": [10 if best else 7 for best in is_best],
                "color": [mark.color if best else style.fade(mark.color, 0.4) for best in is_best],
                "line": {"width": 0},
            },
            name=side.name,
            legendgroup=side.name,
            showlegend=legend,
            hovertemplate=f"{side.name}: %{{x:.4~g}}, %{{y:.4~g}}<extra></extra>",
        ),
        go.Scatter(
            x=(corners[:, 0] * signs[0]).tolist(),
            y=(corners[:, 1] * signs[1]).tolist(),
            mode="lines",
            line={"color": mark.color, "width": 1.5, "shape": "hv"},
            legendgroup=side.name,
            showlegend=False,
            hoverinfo="skip",
        ),
    ]
