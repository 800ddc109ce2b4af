"""The look that all interactive figures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from gdpo_tune.figures import style

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
}
TEMPLATE = go.layout.Template(layout={"xaxis": AXIS, "yaxis": AXIS})


def base_layout(height: float, margins: Mapping[str, int]) -> dict[str, Any]:
    """Layout of a figure `height` pixels high: light, with its legend in one line above."""
    return {
        "template": TEMPLATE,
        "height": round(height),
        "margin": dict(margins),
        "paper_bgcolor": style.PAPER,
        "plot_bgcolor": style.PAPER,
        "font": {"family": style.FONT, "size": 12.5, "color": style.INK},
        "hoverlabel": {
            "bgcolor": style.PAPER,
            "bordercolor": style.FAINT,
            "font": {"color": style.INK, "size": 12},
            "align": "left",
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "bgcolor": "rgba(0,0,0,0)",
        },
    }
