"""Two searches in every pair of objectives: their points, and which goals each attains more often.

Shapes: T configurations, M objectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, islice
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.attainment import attainment
from gdpo_tune.analysis.comparison import Comparison
from gdpo_tune.analysis.pareto import Floats, loss_front
from gdpo_tune.analysis.resampling import drawn_again
from gdpo_tune.analysis.sides import Side
from gdpo_tune.core.formatting import abbreviate
from gdpo_tune.core.trials import Objective
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

LEFT = style.Mark("#0072b2", "circle", "o")
RIGHT = style.Mark("#d55e00", "square", "s")
GRID = 36
"""Goals along each axis of a panel."""
SETS = 200
"""Fronts that attainment is a share of."""
SCALE = [
    (0.0, style.faded(RIGHT.color, 0.6)),
    (0.5, "rgba(127,127,127,0)"),
    (1.0, style.faded(LEFT.color, 0.6)),
]


def sides_figure(comparison: Comparison) -> go.Figure:
    """A panel a pair of objectives: points of both sides over the difference in attainment.

    Blue ground: the left side's front reaches there more often when its configurations are drawn
    again; orange: the right side's.
    """
    pairs = list(combinations(range(len(comparison.objectives)), 2))
    columns = min(3, max(1, len(pairs)))
    rows = max(1, math.ceil(len(pairs) / columns))
    figure: go.Figure = make_subplots(
        rows=rows, cols=columns, horizontal_spacing=0.08, vertical_spacing=0.14
    )
    for index, (first, second) in enumerate(pairs):
        cell: dict[str, Any] = {"row": index // columns + 1, "col": index % columns + 1}
        goals = comparison.objectives[first], comparison.objectives[second]
        for trace in _panel(comparison, (first, second), goals, legend=index == 0):
            figure.add_trace(trace, **cell)
        for update, goal in ((figure.update_xaxes, goals[0]), (figure.update_yaxes, goals[1])):
            less = goal.direction == "minimize"
            update(
                title_text=abbreviate(goal.name) + (" (less is better)" if less else ""),
                autorange="reversed" if less else True,
                **cell,
            )
    figure.update_layout(**base_layout(rows * 400 + 70, {"l": 64, "r": 16, "t": 56, "b": 56}))
    return figure


def effects_figure(comparison: Comparison) -> go.Figure:
    """For each objective, how often a configuration of the left side beats one of the right one."""
    names = list(comparison.superiority)[::-1]
    effects = [comparison.superiority[name] for name in names]
    figure = go.Figure(
        go.Scatter(
            x=[effect.value for effect in effects],
            y=[abbreviate(name) for name in names],
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
            text=[f"p = {effect.corrected:.3f}, corrected" for effect in effects],
            hovertemplate="%{y}: %{x:.0%}<br>%{text}<extra></extra>",
        )
    )
    figure.add_vline(x=0.5, line={"color": style.MUTED, "width": 1, "dash": "dash"})
    figure.update_layout(**base_layout(110 + 46 * len(names), {"l": 64, "r": 16, "t": 16, "b": 56}))
    left, right = comparison.left.name, comparison.right.name
    figure.update_xaxes(
        title_text=f"pairs in which {left} beats {right}", tickformat=".0%", range=[0, 1]
    )
    return figure


def _panel(
    comparison: Comparison, columns: tuple[int, int], goals: Sequence[Objective], *, legend: bool
) -> list[go.Scatter | go.Heatmap]:
    sides = (comparison.left, comparison.right)
    points = [side.points[:, list(columns)] for side in sides]
    signs = [-1.0 if goal.direction == "maximize" else 1.0 for goal in goals]
    traces: list[go.Scatter | go.Heatmap] = []
    whole = np.vstack(points)
    whole = whole[np.isfinite(whole).all(axis=1)]
    if len(whole) and all(side.tried for side in sides):
        traces.append(_ground(points, whole, signs))
    for side, rows, mark in zip(sides, points, (LEFT, RIGHT), strict=True):
        traces += _points(side, rows, signs, mark, legend=legend)
    return traces


def _ground(points: Sequence[Floats], whole: Floats, signs: Sequence[float]) -> go.Heatmap:
    """Where one side attains more often, over the span of all points."""
    low, high = whole.min(axis=0), whole.max(axis=0)
    margin = 0.06 * (high - low)
    axes = [np.linspace(low[i] - margin[i], high[i] + margin[i], GRID) for i in (0, 1)]
    goals = np.array([(x, y) for y in axes[1] for x in axes[0]])
    again = list(islice(drawn_again(len(points[0]), len(points[1])), SETS))
    left = attainment((points[0][mine] for mine, _ in again), goals)
    right = attainment((points[1][others] for _, others in again), goals)
    return go.Heatmap(
        x=(axes[0] * signs[0]).tolist(),
        y=(axes[1] * signs[1]).tolist(),
        z=(left - right).reshape(GRID, GRID).round(3).tolist(),
        zmin=-1,
        zmax=1,
        colorscale=SCALE,
        showscale=False,
        zsmooth="best",
        hovertemplate="attained %{z:+.0%} more often on the left<extra></extra>",
    )


def _points(
    side: Side,
    rows: Floats,
    signs: Sequence[float],
    mark: style.Mark,
    *,
    legend: bool,
) -> list[go.Scatter]:
    found = rows[np.isfinite(rows).all(axis=1)]
    best = loss_front(found)
    corners = found[best][np.argsort(found[best][:, 0])]
    return [
        go.Scatter(
            x=(found[:, 0] * signs[0]).tolist(),
            y=(found[:, 1] * signs[1]).tolist(),
            mode="markers",
            marker={
                "symbol": mark.plotly,
                "size": [10 if top else 7 for top in best],
                "color": [mark.color if top else style.faded(mark.color, 0.4) for top in best],
                "line": {"width": 0},
            },
            name=side.name,
            legendgroup=side.name,
            showlegend=legend,
            hovertemplate=f"{side.name}: %{{x:.3f}}, %{{y:.3f}}<extra></extra>",
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
