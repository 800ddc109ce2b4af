"""What trials were worth at their rungs, on validation prompts, up to the end of their training."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import abbreviate, mode_of
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

MOST = 120
"""Trials that are drawn: those of the front first, then the latest."""


def measured_on_the_way(records: Sequence[TrialRecord]) -> bool:
    """Whether any trial has two measurements to join."""
    return any(len(record.rungs) > 1 for record in records)


def rungs_figure(front: Front) -> go.Figure:
    """A panel an objective; strong: trials of the front; a cross where a trial was stopped."""
    strong = {number for member in front.members for number in member.numbers}
    shown = [record for record in front.records if record.rungs]
    shown.sort(key=lambda record: (record.number in strong, record.number))
    figure: go.Figure = make_subplots(
        rows=1,
        cols=len(front.objectives),
        horizontal_spacing=0.06,
        column_titles=[abbreviate(goal.name) for goal in front.objectives],
    )
    modes: set[str] = set()
    for record in shown[-MOST:]:
        mode = mode_of(record.params)
        for column, goal in enumerate(front.objectives, start=1):
            legend = column == 1 and record.number in strong and mode not in modes
            curve = _curve(record, goal.name, strong=record.number in strong, legend=legend)
            figure.add_trace(curve, row=1, col=column)
            modes |= {mode} if legend else set()
    figure.update_layout(**base_layout(360, {"l": 64, "r": 16, "t": 72, "b": 52}))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="on validation prompts", col=1)
    return figure


def _curve(record: TrialRecord, objective: str, *, strong: bool, legend: bool) -> go.Scatter:
    mark = style.mark_of(mode_of(record.params))
    color = mark.color if strong else style.faded(mark.color, 0.3)
    known = [rung for rung in record.rungs if objective in rung.validation]
    symbols = [mark.plotly] * len(known)
    if record.state == "pruned" and symbols:
        symbols[-1] = "x"
    return go.Scatter(
        x=[rung.step for rung in known],
        y=[rung.validation[objective].mean for rung in known],
        mode="lines+markers",
        line={"color": color, "width": 2 if strong else 1},
        marker={"symbol": symbols, "size": 7 if strong else 5, "color": color},
        name=mode_of(record.params),
        legendgroup=mode_of(record.params),
        showlegend=legend,
        hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.3f}}<extra></extra>",
    )
