"""Slices: each searched number, the reward weights first, against each objective."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.effects import is_logarithmic
from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import abbreviate, format_parameter, mode_of
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

MOST = 5
"""Parameters that are drawn."""


def sliced(front: Front, dimensions: Sequence[str]) -> list[str]:
    """The parameters that slices are drawn of: those with numbers that were varied."""
    found = [name for name in dimensions if len(set(_numbers(_trained(front), name))) > 2]
    found.sort(key=lambda name: not name.startswith("reward_weights."))
    return found[:MOST]


def slices_figure(front: Front, dimensions: Sequence[str]) -> go.Figure:
    """A row an objective, a column a parameter; one point a configuration, in its mode's colour."""
    names, shown = sliced(front, dimensions), _trained(front)
    modes = sorted({mode_of(c.params) for c in shown})
    figure: go.Figure = make_subplots(
        rows=len(front.objectives),
        cols=max(1, len(names)),
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.02,
        vertical_spacing=0.04,
    )
    for row, goal in enumerate(front.objectives, start=1):
        for column, name in enumerate(names, start=1):
            for mode in modes:
                chosen = [c for c in shown if mode_of(c.params) == mode and name in c.params]
                trace = _points(chosen, name, goal.name, mode, legend=row == column == 1)
                figure.add_trace(trace, row=row, col=column)
        figure.update_yaxes(title_text=abbreviate(goal.name), row=row, col=1)
    for column, name in enumerate(names, start=1):
        numbers = _numbers(shown, name)
        if is_logarithmic(numbers):
            ticks = style.log_ticks(min(numbers), max(numbers))
            texts = [format_parameter(tick) for tick in ticks]
            figure.update_xaxes(type="log", tickvals=ticks, ticktext=texts, col=column)
        figure.update_xaxes(title_text=abbreviate(name), row=len(front.objectives), col=column)
    height = 120 + 190 * len(front.objectives)
    figure.update_layout(**base_layout(height, {"l": 64, "r": 16, "t": 48, "b": 52}))
    return figure


def _points(
    chosen: Sequence[Configuration], name: str, objective: str, mode: str, *, legend: bool
) -> go.Scatter:
    mark = style.mark_of(mode)
    return go.Scatter(
        x=[c.params[name] for c in chosen],
        y=[c.mean[objective].mean for c in chosen],
        mode="markers",
        marker={
            "symbol": mark.plotly,
            "size": [9 if c.on_front else 6 for c in chosen],
            "color": [mark.color if c.on_front else style.faded(mark.color, 0.4) for c in chosen],
        },
        text=[f"trial {c.first}" for c in chosen],
        hovertemplate="%{text}: %{x:.3g}, %{y:.3f}<extra></extra>",
        name=mode,
        legendgroup=mode,
        showlegend=legend,
    )


def _trained(front: Front) -> list[Configuration]:
    return [c for c in front.configurations if c.role != "untrained"]


def _numbers(shown: Sequence[Configuration], name: str) -> list[float]:
    values = [c.params.get(name) for c in shown]
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
