"""Parallel coordinates: which parameters lead to which objectives, selected with the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from gdpo_tune.analysis.effects import is_logarithmic
from gdpo_tune.analysis.front import Front
from gdpo_tune.core.text import abbreviate_parameter, format_parameter, get_mode
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout


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
                "colorscale": _build_scale([style.get_mark(mode).color for mode in modes]),
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
    label = abbreviate_parameter(name)
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) != len(values):
        names = sorted({format_parameter(value) for value in values})
        ticks = list(range(len(names)))
        places = [names.index(format_parameter(value)) for value in values]
        return {"label": label, "values": places, "tickvals": ticks, "ticktext": names}
    distinct = sorted(set(numbers))
    if len(distinct) <= 5:
        texts = [format_parameter(value) for value in distinct]
        return {"label": label, "values": numbers, "tickvals": distinct, "ticktext": texts}
    if is_logarithmic(distinct):
        ticks = style.list_log_ticks(distinct[0], distinct[-1])
        return {
            "label": label,
            "values": [math.log10(value) for value in numbers],
            "tickvals": [math.log10(tick) for tick in ticks],
            "ticktext": [format_parameter(tick) for tick in ticks],
        }
    return {"label": label, "values": numbers, "tickformat": "~g"}


def _build_scale(colors: Sequence[str]) -> list[tuple[float, str]]:
    """Return a colour scale without transitions."""
    share = 1 / max(len(colors), 1)
    return [
        (min(1.0, edge), color)
        for index, color in enumerate(colors)
        for edge in (index * share, (index + 1) * share)
    ]
