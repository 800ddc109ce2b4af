"""Figures of attainment: how certain a front is, and which of two searches reaches where.

Shapes: T configurations, M objectives, D draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, islice

import numpy as np
import plotly.graph_objects as go

from gdpo_tune.analysis.comparison import Arm, Comparison, draw_resamples
from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.pareto import (
    Floats,
    compute_attainment,
    compute_losses,
    mark_front,
    select_front,
)
from gdpo_tune.core.text import abbreviate_parameter
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout, make_panels, title_axes

SURFACE_CELLS, DIFFERENCE_CELLS = 48, 36
"""Goals along each axis of a panel."""
DRAWS = 200
"""Fronts that are recomputed, of a sweep or of each side, for the shares of attainment."""
LEVELS = ((0.975, "conservative", "dot"), (0.5, "median", "solid"), (0.025, "optimistic", "dash"))
"""Share of the recomputed fronts that attain what lies below and left of the line."""
LEFT = style.Mark("#0072b2", "circle", "o")
RIGHT = style.Mark("#d55e00", "square", "s")
SCALE = [
    (0.0, style.fade(RIGHT.color, 0.6)),
    (0.5, "rgba(127,127,127,0)"),
    (1.0, style.fade(LEFT.color, 0.6)),
]


def draw_attainment(front: Front) -> go.Figure:
    """Draw a panel for each pair of objectives: what 97.5 %, half and 2.5 % of the fronts attain.

    `front` has members, and at least two objectives.
    """
    pairs = list(combinations(range(len(front.objectives)), 2))
    figure, cells = make_panels(len(pairs))
    shown = [c for c in front.configurations if c.rank >= 0]
    means = compute_losses([c.get_values(front.objectives) for c in shown], front.objectives)
    errors = np.array([c.get_errors(front.objectives) for c in shown])
    noise = np.random.default_rng(0).standard_normal((DRAWS, *errors.shape))
    for (first, second), cell in zip(pairs, cells, strict=True):
        pair = [first, second]
        goals = [front.objectives[index] for index in pair]
        signs = [-1 if goal.direction == "maximize" else 1 for goal in goals]
        draws = (means + errors * noise)[:, :, pair]
        low, high = draws.min(axis=(0, 1)), draws.max(axis=(0, 1))
        axes = [np.linspace(low[i], high[i], SURFACE_CELLS) for i in (0, 1)]
        grid = np.array([(x, y) for y in axes[1] for x in axes[0]])
        # Non-dominated points attain what all attain, for less work.
        share = compute_attainment(map(select_front, draws), grid)
        levels = share.reshape(SURFACE_CELLS, SURFACE_CELLS).round(3).tolist()
        points = go.Scatter(
            x=(means[:, first] * signs[0]).tolist(),
            y=(means[:, second] * signs[1]).tolist(),
            mode="markers",
            marker={"color": style.fade(style.MUTED, 0.45), "size": 5},
            hoverinfo="skip",
            showlegend=False,
        )
        lines = [
            go.Contour(
                x=(axes[0] * signs[0]).tolist(),
                y=(axes[1] * signs[1]).tolist(),
                z=levels,
                contours={"type": "constraint", "operation": "=", "value": level},
                line={"color": style.REWARDS[0], "width": 2, "dash": dash, "smoothing": 0},
                name=f"{name} (attained by {100 * level:g} %)",
                legendgroup=name,
                showlegend=cell == cells[0],
                hoverinfo="skip",
            )
            for level, name, dash in LEVELS
        ]
        figure.add_traces([points, *lines], rows=cell["row"], cols=cell["col"])
        title_axes(figure, goals, cell)
    return figure


def draw_sides(comparison: Comparison) -> go.Figure:
    """Draw a panel per pair of objectives: points of both sides over the attainment difference.

    Blue background: the left side's front reaches there more often when its configurations are
    resampled; orange: the right side's.
    """
    pairs = list(combinations(range(len(comparison.left.objectives)), 2))
    figure, cells = make_panels(len(pairs))
    sides = (comparison.left, comparison.right)
    for pair, cell in zip(pairs, cells, strict=True):
        goals = [comparison.left.objectives[index] for index in pair]
        signs = [-1.0 if goal.direction == "maximize" else 1.0 for goal in goals]
        losses = [side.points[:, list(pair)] for side in sides]
        traces = _trace_background(comparison, losses, signs)
        for side, points, mark in zip(sides, losses, (LEFT, RIGHT), strict=True):
            traces += _trace_side(side, points, signs, mark, legend=cell == cells[0])
        figure.add_traces(traces, rows=cell["row"], cols=cell["col"])
        title_axes(figure, goals, cell)
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


def _trace_background(
    comparison: Comparison, losses: Sequence[Floats], signs: Sequence[float]
) -> list[go.Heatmap | go.Scatter]:
    """Return where one side attains more often, of all losses `[T, 2]`; may be nothing."""
    measured = np.vstack(losses)
    measured = measured[np.isfinite(measured).all(axis=1)]
    if not len(measured) or not all(len(points) for points in losses):
        return []
    low, high = measured.min(axis=0), measured.max(axis=0)
    margin = 0.06 * (high - low)
    axes = [np.linspace(low[i] - margin[i], high[i] + margin[i], DIFFERENCE_CELLS) for i in (0, 1)]
    goals = np.array([(x, y) for y in axes[1] for x in axes[0]])
    resamples = list(islice(draw_resamples(len(losses[0]), len(losses[1])), DRAWS))
    left = compute_attainment((losses[0][rows] for rows, _ in resamples), goals)
    right = compute_attainment((losses[1][rows] for _, rows in resamples), goals)
    names = f"{comparison.left.name} minus {comparison.right.name}"
    return [
        go.Heatmap(
            x=(axes[0] * signs[0]).tolist(),
            y=(axes[1] * signs[1]).tolist(),
            z=(left - right).reshape(DIFFERENCE_CELLS, DIFFERENCE_CELLS).round(3).tolist(),
            zmin=-1,
            zmax=1,
            colorscale=SCALE,
            showscale=False,
            zsmooth="best",
            hovertemplate=f"attained by {names}: %{{z:+.0%}}<extra></extra>",
        )
    ]


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
