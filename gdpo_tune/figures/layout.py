"""Layout that the interactive figures share."""

from __future__ import annotations

import math
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.core.metrics import HOUR
from gdpo_tune.figures import style

WIDTH = 1120
"""Pixels of a figure in a wide window; labels are placed for this width."""
MARGINS = {"l": 64, "r": 40, "t": 48, "b": 52}
"""At the right there is room for the buttons, which would cover the legend elsewhere."""
GAP_ACROSS, GAP_UP = 0.075, 103
"""Space between two panels: across as a share of the whole, and up in pixels, whatever the rows."""
AXIS = {
    "gridcolor": style.GRID,
    "linecolor": style.FAINT,
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": style.FAINT,
    "ticklen": 4,
    "title": {"standoff": 10},
    "automargin": True,
    "exponentformat": "e",  # 6e-5 as in text, not 60µ
}
TEMPLATE = go.layout.Template(layout={"xaxis": AXIS, "yaxis": AXIS})


def make_layout(height: float, **margins: int) -> dict[str, Any]:
    """Return the layout of a figure: light, with its legend in one line above.

    Lengths are in pixels; `margins` are `l`, `r`, `t` or `b`, where they differ from `MARGINS`.
    """
    clear, top_left = {"bgcolor": "rgba(0,0,0,0)"}, {"xanchor": "left", "yanchor": "top"}
    return {
        "template": TEMPLATE,
        "height": round(height),
        "margin": MARGINS | margins,
        "paper_bgcolor": style.PAPER,
        "plot_bgcolor": style.PAPER,
        "font": {"family": style.FONT, "size": 12.5, "color": style.INK},
        "hoverlabel": {
            "bgcolor": style.PAPER,
            "bordercolor": style.FAINT,
            "font": {"color": style.INK, "size": 12},
            "align": "left",
        },
        "modebar": {"orientation": "v", "color": style.FAINT, "activecolor": style.INK, **clear},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yref": "container", **top_left, **clear},
    }


def get_panel_size(panels: int) -> tuple[float, float]:
    """Return width and height of one of `panels` panels in pixels."""
    columns = style.count_columns(panels)
    inner = WIDTH - MARGINS["l"] - MARGINS["r"]
    return inner * (1 - GAP_ACROSS * (columns - 1)) / columns, 430.0 if columns == 1 else 270.0


def make_panels(count: int) -> tuple[go.Figure, list[dict[str, Any]]]:
    """Return a figure of `count` panels, and the `row` and `col` of each."""
    columns = style.count_columns(count)
    rows = math.ceil(count / columns)
    inner = rows * get_panel_size(count)[1] + (rows - 1) * GAP_UP
    figure: go.Figure = make_subplots(
        rows=rows,
        cols=columns,
        horizontal_spacing=GAP_ACROSS if columns > 1 else 0.0,
        vertical_spacing=GAP_UP / inner if rows > 1 else 0.0,
    )
    figure.update_layout(**make_layout(inner + 64 + 56, t=64, b=56))
    return figure, [
        {"row": index // columns + 1, "col": index % columns + 1} for index in range(count)
    ]


def wrap_title(title: str) -> str:
    """Return the title of an axis in lines that are no longer than the axis."""
    return "<br>".join(wrap(title, 36))


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """Return the length in seconds of the unit that suits a span of time, and its plural."""
    units = {"days": 86400.0, "hours": HOUR, "minutes": 60.0, "seconds": 1.0}
    name = next((name for name, length in units.items() if seconds >= 2 * length), "seconds")
    return units[name], name
