"""Hypervolume over trials."""

from __future__ import annotations

import plotly.graph_objects as go

from gdpo_tune.analysis.front import Front
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

CROWDED = 60
"""Trials from which the marks are drawn smaller."""


def hypervolume_figure(front: Front) -> go.Figure:
    """The front's hypervolume after each trained trial that ended, in order of ending.

    Replicates are marked: the curve may fall there, when they correct a lucky first trial. A trial
    that failed or was stopped leaves it level.
    """
    trace = front.hypervolume_over_trials
    record_of = {record.number: record for record in front.records}
    counts = list(range(1, len(trace) + 1))
    values = [point.hypervolume for point in trace]
    figure = go.Figure(
        go.Scatter(
            x=counts,
            y=values,
            mode="lines",
            line={"color": style.INK, "width": 1.6, "shape": "hv"},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    kinds = [
        ("search", "complete", style.Mark("#0072b2", "circle", "o")),
        ("replicate", "replicate", style.Mark("#e69f00", "diamond", "D")),
        ("ended", "failed or stopped", style.Mark("#d55e00", "x", "X")),
    ]
    for kind, name, mark in kinds:
        chosen = [
            (count, point)
            for count, point in zip(counts, trace, strict=True)
            if _kind(record_of[point.number].state, record_of[point.number].role) == kind
        ]
        if not chosen:
            continue
        figure.add_trace(
            go.Scatter(
                x=[count for count, _ in chosen],
                y=[point.hypervolume for _, point in chosen],
                mode="markers",
                marker={
                    "symbol": mark.plotly,
                    "color": mark.color,
                    "size": 7 if len(trace) <= CROWDED else 4,
                },
                text=[f"trial {point.number}" for _, point in chosen],
                hovertemplate="%{text}: hypervolume %{y:.4f} after %{x} trials<extra></extra>",
                name=name,
            )
        )
    figure.update_layout(**base_layout(330, {"l": 64, "r": 16, "t": 48, "b": 52}))
    figure.update_xaxes(title_text="trials ended", dtick=1 if len(trace) <= 12 else None)
    figure.update_yaxes(title_text="hypervolume", rangemode="tozero")
    return figure


def _kind(state: str, role: str) -> str:
    if state != "complete":
        return "ended"
    return "replicate" if role == "replicate" else "search"
