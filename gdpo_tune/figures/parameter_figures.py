"""Figures of the searched parameters: importance, slices, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.importance import Effects, Strength, is_logarithmic
from gdpo_tune.core.text import abbreviate_parameter, format_parameter, get_mode
from gdpo_tune.core.trials import ParamValue, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout

MAX_PARAMETERS = 5
"""Most parameters of which slices are drawn: reward weights first."""
OPACITIES: dict[Strength, float] = {"clear": 1.0, "unclear": 0.5, "none": 0.15}
STRENGTH_TEXTS: dict[Strength, str] = {
    "clear": "",
    "unclear": "<br>unclear",
    "none": "<br>no detectable effect",
}


def draw_importance(effects: Effects) -> go.Figure:
    """Draw a panel per objective and a bar per parameter, pale without a detectable effect."""
    objectives = list(dict.fromkeys(effect.objective for effect in effects.estimates))
    parameters = list(dict.fromkeys(effect.parameter for effect in effects.estimates))[::-1]
    figure: go.Figure = make_subplots(
        rows=1,
        cols=len(objectives),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        column_titles=[abbreviate_parameter(name) for name in objectives],
    )
    by_pair = {(effect.objective, effect.parameter): effect for effect in effects.estimates}
    color = style.REWARDS[0]
    for column, objective in enumerate(objectives, start=1):
        shown = [by_pair[objective, parameter] for parameter in parameters]
        figure.add_bar(
            x=[effect.importance for effect in shown],
            y=[abbreviate_parameter(effect.parameter) for effect in shown],
            orientation="h",
            marker={
                "color": [style.fade(color, OPACITIES[effect.strength]) for effect in shown],
                "line": {"color": color, "width": 1.2},
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [effect.interval.high - effect.importance for effect in shown],
                "arrayminus": [effect.importance - effect.interval.low for effect in shown],
                "color": style.MUTED,
                "thickness": 1.3,
                "width": 4,
            },
            text=[
                f"95 %: {effect.interval.low:.0%} to {effect.interval.high:.0%}"
                f"{STRENGTH_TEXTS[effect.strength]}"
                for effect in shown
            ],
            textposition="none",
            hovertemplate="%{y}: %{x:.0%}<br>%{text}<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
        )
    figure.update_layout(**make_layout(140 + 34 * len(parameters), t=64, b=56), bargap=0.4)
    # No tick at 100 %: its label would touch the next panel's 0 %.
    ticks: dict[str, Any] = {"tickformat": ".0%", "tickvals": [0, 0.2, 0.4, 0.6, 0.8]}
    figure.update_xaxes(title_text="share of variance", range=[0, 1], **ticks)
    return figure


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
                drawn = [c for c in shown if get_mode(c.params) == mode and name in c.params]
                mark = style.get_mark(mode)
                faded = style.fade(mark.color, 0.4)
                figure.add_scatter(
                    x=[c.params[name] for c in drawn],
                    y=[c.mean[goal.name].mean for c in drawn],
                    mode="markers",
                    marker={
                        "symbol": mark.plotly,
                        "size": [9 if c.is_on_front else 6 for c in drawn],
                        "color": [mark.color if c.is_on_front else faded for c in drawn],
                    },
                    text=[title_candidate(c.name) for c in drawn],
                    hovertemplate="%{text}: %{x:.3g}, %{y:.4~g}<extra></extra>",
                    name=mode,
                    legendgroup=mode,
                    showlegend=row == column == 1,
                    row=row,
                    col=column,
                )
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


def _list_numbers(front: Front, name: str) -> list[float]:
    values = [c.params.get(name) for c in front.configurations if c.is_training]
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def draw_parallel(front: Front, dimensions: Sequence[str]) -> go.Figure:
    """Draw a line per trained configuration; an axis per searched parameter and per objective.

    Dragging along an axis keeps the lines that pass there. Configurations that violate a constraint
    are drawn too. `dimensions` are the searched parameters, in the order of their axes.
    """
    shown = [c for c in front.configurations if c.is_training]
    modes = sorted({get_mode(c.params) for c in shown})
    axes = [_build_axis(name, [c.params.get(name) for c in shown]) for name in dimensions]
    axes += [
        {
            "label": abbreviate_parameter(goal.name),
            "values": [c.mean[goal.name].mean for c in shown],
            "tickformat": ".3~g",
        }
        for goal in front.objectives
    ]
    figure = go.Figure(
        go.Parcoords(
            dimensions=axes,
            line={
                "color": [modes.index(get_mode(c.params)) for c in shown],
                "colorscale": [
                    (edge / len(modes), style.get_mark(mode).color)
                    for index, mode in enumerate(modes)
                    for edge in (index, index + 1)
                ],
                "cmin": -0.5,
                "cmax": len(modes) - 0.5,
            },
            labelfont={"size": 12.5, "color": style.INK},
            tickfont={"size": 11, "color": style.MUTED},
            rangefont={"size": 1, "color": "rgba(0,0,0,0)"},
            unselected={"line": {"color": style.FAINT, "opacity": 0.25}},
        )
    )
    figure.update_layout(**make_layout(400, l=90, r=60, t=56, b=28))
    return figure


def _build_axis(name: str, values: Sequence[ParamValue | None]) -> dict[str, Any]:
    axis: dict[str, Any] = {"label": abbreviate_parameter(name)}
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) != len(values):
        names = sorted({format_parameter(value) for value in values})
        places = [names.index(format_parameter(value)) for value in values]
        return axis | {"values": places, "tickvals": [*range(len(names))], "ticktext": names}
    distinct = sorted(set(numbers))
    if len(distinct) <= 5:
        texts = [format_parameter(value) for value in distinct]
        return axis | {"values": numbers, "tickvals": distinct, "ticktext": texts}
    if not is_logarithmic(distinct):
        return axis | {"values": numbers, "tickformat": "~g"}
    ticks = style.list_log_ticks(distinct[0], distinct[-1])
    return axis | {
        "values": [math.log10(value) for value in numbers],
        "tickvals": [math.log10(tick) for tick in ticks],
        "ticktext": [format_parameter(tick) for tick in ticks],
    }
