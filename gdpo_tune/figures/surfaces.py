"""Empirical attainment surfaces: how certain it is which goals the front attains.

Shapes: T configurations, M objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import plotly.graph_objects as go

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.pareto import Floats, compute_attainment, compute_losses
from gdpo_tune.core.trials import Objective
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_panels, title_axes

GRID = 48
DRAWS = 200
"""Fronts that are recomputed, each mean resampled with its standard error."""
LEVELS = ((0.975, "conservative", "dot"), (0.5, "median", "solid"), (0.025, "optimistic", "dash"))
"""Share of the recomputed fronts that attain what lies below and left of the line."""


def draw_surfaces(front: Front) -> go.Figure:
    """Draw a panel for each pair of objectives: what 97.5 %, half and 2.5 % of the fronts attain.

    `front` has members, and at least two objectives.
    """
    pairs = list(combinations(range(len(front.objectives)), 2))
    figure, cells = make_panels(len(pairs))
    shown = [c for c in front.configurations if c.rank >= 0]
    means = compute_losses([c.get_values(front.objectives) for c in shown], front.objectives)
    errors = np.array([c.get_errors(front.objectives) for c in shown])
    noise = np.random.default_rng(0).standard_normal((DRAWS, *errors.shape))
    draws = means + errors * noise
    for pair, cell in zip(map(list, pairs), cells, strict=True):
        goals = [front.objectives[index] for index in pair]
        traces = _trace_panel(draws[:, :, pair], means[:, pair], goals, legend=cell == cells[0])
        figure.add_traces(traces, rows=cell["row"], cols=cell["col"])
        title_axes(figure, goals, cell)
    return figure


def _trace_panel(
    draws: Floats, means: Floats, goals: Sequence[Objective], *, legend: bool
) -> list[go.Contour | go.Scatter]:
    """Return the means `[T, 2]` and a line per level of the draws `[DRAWS, T, 2]`, all losses."""
    signs = [-1 if goal.direction == "maximize" else 1 for goal in goals]
    low, high = draws.min(axis=(0, 1)), draws.max(axis=(0, 1))
    axes = [np.linspace(low[i], high[i], GRID) for i in (0, 1)]
    grid = np.array([(x, y) for y in axes[1] for x in axes[0]])
    share = compute_attainment((_find_border(points) for points in draws), grid).reshape(GRID, GRID)
    traces: list[go.Contour | go.Scatter] = [
        go.Scatter(
            x=(means[:, 0] * signs[0]).tolist(),
            y=(means[:, 1] * signs[1]).tolist(),
            mode="markers",
            marker={"color": style.fade(style.MUTED, 0.45), "size": 5},
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
                name=f"{name} (attained by {100 * level:g} %)",
                legendgroup=name,
                showlegend=legend,
                hoverinfo="skip",
            )
        )
    return traces


def _find_border(points: Floats) -> Floats:
    """Return the non-dominated of points `[T, 2]`: they attain what all attain, for less work."""
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    best = np.minimum.accumulate(ordered[:, 1])
    return ordered[np.r_[True, ordered[1:, 1] < best[:-1]]]
