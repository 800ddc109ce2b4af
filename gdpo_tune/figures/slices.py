"""Slices: each numeric parameter that was searched against each objective."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.effects import is_logarithmic
from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import abbreviate_parameter, format_parameter, get_mode
from gdpo_tune.core.trials import title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout

MAX_PARAMETERS = 5
"""Most parameters that are drawn: reward weights first."""


def list_sliced(front: Front, dimensions: Sequence[str]) -> list[str]:
    """Return the parameters to draw: those with more than two different numbers."""
    names = [name for name in dimensions if len(set(_list_numbers(front, name))) > 2]
    names.sort(key=lambda name: not name.startswith("reward_weights."))
    return names[:MAX_PARAMETERS]


def draw_slices(front: Front, dimensions: Sequence[str]) -> go.Figure:
    """Draw a row per objective, a column per parameter, and a point per configuration."""
    names = list_sliced(front, dimensions)
    shown = [c for c in front.configurations if c.is_training]
    modes = sorted({get_mode(c.params) for c in shown})
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
                of_mode = [c for c in shown if get_mode(c.params) == mode and name in c.params]
                trace = _trace_points(of_mode, name, goal.name, mode, legend=row == column == 1)
                figure.add_trace(trace, row=row, col=column)
        figure.update_yaxes(title_text=abbreviate_parameter(goal.name), row=row, col=1)
    for column, name in enumerate(names, start=1):
        numbers = _list_numbers(front, name)
        if is_logarithmic(numbers):
            ticks = style.list_log_ticks(min(numbers), max(numbers))
            texts = [format_parameter(tick) for tick in ticks]
            figure.update_xaxes(type="log", tickvals=ticks, ticktext=texts, col=column)
        figure.update_xaxes(
            title_text=abbreviate_parameter(name), row=len(front.objectives), col=column
        )
    figure.update_layout(**make_layout(120 + 190 * len(front.objectives)))
    return figure


def _trace_points(
    shown: Sequence[Configuration], name: str, objective: str, mode: str, *, legend: bool
) -> go.Scatter:
    mark = style.get_mark(mode)
    return go.Scatter(
        x=[c.params[name] for c in shown],
        y=[c.mean[objective].mean for c in shown],
        mode="markers",
        marker={
            "symbol": mark.plotly,
            "size": [9 if c.is_on_front else 6 for c in shown],
            "color": [mark.color if c.is_on_front else style.fade(mark.color, 0.4) for c in shown],
        },
        text=[title_candidate(c.name) for c in shown],
        hovertemplate="%{text}: %{x:.3g}, %{y:.4~g}<extra></extra>",
        name=mode,
        legendgroup=mode,
        showlegend=legend,
    )


def _list_numbers(front: Front, name: str) -> list[float]:
    values = [c.params.get(name) for c in front.configurations if c.is_training]
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
