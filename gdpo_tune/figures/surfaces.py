"""Empirical attainment surfaces: how sure it is which goals the front attains."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.attainment import attainment
from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.pareto import Floats, losses
from gdpo_tune.core.formatting import abbreviate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

GRID = 48
DRAWS = 200
"""Fronts that are drawn: every mean anew, with its standard error."""
LEVELS = ((0.975, "nearly sure", "dot"), (0.5, "even", "solid"), (0.025, "hardly ever", "dash"))
"""Share of the drawn fronts that attain what lies below and left of the line."""


def surfaces_figure(front: Front) -> go.Figure:
    """A panel a pair of objectives: the goals that 97.5 %, half and 2.5 % of drawn fronts attain.

    Args:
        front: with members, and two objectives at least.
    """
    pairs = list(combinations(range(len(front.objectives)), 2))
    columns = min(3, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    figure: go.Figure = make_subplots(
        rows=rows, cols=columns, horizontal_spacing=0.08, vertical_spacing=0.16
    )
    drawn, means = _drawn(front), _losses(front)
    for index, pair in enumerate(pairs):
        cell: dict[str, Any] = {"row": index // columns + 1, "col": index % columns + 1}
        for trace in _lines(front, drawn[:, :, list(pair)], means[:, list(pair)], pair, index == 0):
            figure.add_trace(trace, **cell)
        for update, place in ((figure.update_xaxes, pair[0]), (figure.update_yaxes, pair[1])):
            goal = front.objectives[place]
            less = goal.direction == "minimize"
            title = abbreviate(goal.name) + (" (less is better)" if less else "")
            update(title_text=title, autorange="reversed" if less else True, **cell)
    figure.update_layout(**base_layout(rows * 380 + 70, {"l": 64, "r": 16, "t": 56, "b": 56}))
    return figure


def _losses(front: Front) -> Floats:
    shown = [c for c in front.configurations if c.rank >= 0]
    return losses([c.values(front.objectives) for c in shown], front.objectives)


def _drawn(front: Front) -> Floats:
    """`[DRAWS, T, M]`, always the same."""
    shown = [c for c in front.configurations if c.rank >= 0]
    errors = np.array([c.errors(front.objectives) for c in shown])
    noise = np.random.default_rng(0).standard_normal((DRAWS, *errors.shape))
    return _losses(front) + errors * noise


def _lines(
    front: Front, drawn: Floats, means: Floats, pair: tuple[int, int], legend: bool
) -> list[go.Contour | go.Scatter]:
    signs = [-1 if front.objectives[i].direction == "maximize" else 1 for i in pair]
    low, high = drawn.min(axis=(0, 1)), drawn.max(axis=(0, 1))
    axes = [np.linspace(low[i], high[i], GRID) for i in (0, 1)]
    goals = np.array([(x, y) for y in axes[1] for x in axes[0]])
    share = attainment((_front_alone(points) for points in drawn), goals).reshape(GRID, GRID)
    traces: list[go.Contour | go.Scatter] = [
        go.Scatter(
            x=(means[:, 0] * signs[0]).tolist(),
            y=(means[:, 1] * signs[1]).tolist(),
            mode="markers",
            marker={"color": style.faded("#667085", 0.45), "size": 5},
            hoverinfo="skip",
            showlegend=False,
        )
    ]
    for level, name, dash in LEVELS:
        traces.append(
            go.Contour(
                x=(axes[0] * signs[0]).tolist(),
                y=(axes[1] * signs[1]).tolist(),
                z=share.round(3).tolist(),
                contours={"type": "constraint", "operation": "=", "value": level},
                line={"color": style.REWARDS[0], "width": 2, "dash": dash, "smoothing": 0},
                name=f"{name} attained ({level:.1%})",
                legendgroup=name,
                showlegend=legend,
                hoverinfo="skip",
            )
        )
    return traces


def _front_alone(points: Floats) -> Floats:
    """The points on the border in two dimensions: they attain what all attain, for less work."""
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    best = np.minimum.accumulate(ordered[:, 1])
    return ordered[np.r_[True, ordered[1:, 1] < best[:-1]]]
