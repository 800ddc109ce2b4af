"""Figures of the searched parameters: effects, slices, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.effects import Effects
from gdpo_tune.analysis.front import Front
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_count,
    format_interval,
    format_parameter,
    get_mode,
)
from gdpo_tune.core.trials import ParamValue, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout
from gdpo_tune.results.wording import describe_contrast

MAX_PARAMETERS = 5
"""Most parameters of which slices are drawn: reward weights first."""
WIDE = 5.0
"""Ratio of the largest to the smallest value from which a figure has a log scale."""


def draw_effects(effects: Effects) -> go.Figure:
    """Draw a panel per objective and an interval per question, pale if it is not told apart."""
    objectives = list(dict.fromkeys(found.objective for found in effects.contrasts))
    figure: go.Figure = make_subplots(
        rows=1,
        cols=len(objectives),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        column_titles=[abbreviate_parameter(name) for name in objectives],
    )
    for column, objective in enumerate(objectives, start=1):
        shown = [found for found in effects.contrasts if found.objective == objective][::-1]
        figure.add_scatter(
            x=[f.value for f in shown],
            y=[f"{abbreviate_parameter(f.dimension)}: {f.before} to {f.after}" for f in shown],
            mode="markers",
            marker={
                "size": 9,
                "color": [style.REWARDS[0] if f.is_told_apart else style.FAINT for f in shown],
            },
            error_x={
                "type": "data",
                "array": [f.interval.high - f.value for f in shown],
                "color": style.MUTED,
                "thickness": 1.3,
                "width": 4,
            },
            text=[
                describe_contrast(f)
                if f.is_told_apart
                else f"cannot be told apart: {format_interval(*f.interval)}<br>"
                f"{format_count(f.more, 'more training')} would tell"
                for f in shown
            ],
            hovertemplate="%{y}<br>%{text}<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
        )
    questions = len(effects.contrasts) // max(1, len(objectives))
    figure.update_layout(**make_layout(140 + 30 * questions, t=64, b=56))
    figure.update_xaxes(title_text="difference", zeroline=True, zerolinecolor=style.FAINT)
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


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether values spread over a factor of `WIDE`, all above 0."""
    return min(values) > 0 and max(values) / min(values) >= WIDE


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
    """Return an axis; a configuration without the parameter stands below its numbers."""
    axis: dict[str, Any] = {"label": abbreviate_parameter(name)}
    known = [value for value in values if value is not None]
    numbers = [float(v) for v in known if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) != len(known):
        names = sorted({format_parameter(value) for value in values})
        places = [names.index(format_parameter(value)) for value in values]
        return axis | {"values": places, "tickvals": [*range(len(names))], "ticktext": names}
    distinct = sorted(set(numbers))
    is_complete, is_log = len(known) == len(values), len(distinct) > 5 and is_logarithmic(distinct)
    if is_complete and len(distinct) > 5 and not is_log:
        return axis | {"values": numbers, "tickformat": "~g"}

    def scale(value: float) -> float:
        return math.log10(value) if is_log else value

    ticks = style.list_log_ticks(distinct[0], distinct[-1]) if is_log else distinct
    if not is_log and len(distinct) > 5:
        ticks = [distinct[0], distinct[-1]]
    places, texts = [scale(tick) for tick in ticks], [format_parameter(tick) for tick in ticks]
    below = scale(distinct[0]) - 0.15 * (scale(distinct[-1]) - scale(distinct[0]) or 1.0)
    if not is_complete:
        places, texts = [below, *places], [NO_VALUE, *texts]
    shown = [below if value is None else scale(float(value)) for value in values]
    return axis | {"values": shown, "tickvals": places, "ticktext": texts}
