"""Validation values of trials at their rungs and at the end of their training."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import abbreviate_parameter, get_mode
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_curve_line, make_layout

MAX_TRIALS = 120
"""Trials that are drawn: those on the front first, then the latest."""


def draw_rungs(front: Front) -> go.Figure:
    """Draw a panel for each objective; the front's trials are strong, a cross is an early stop."""
    shown = [record for record in front.records if record.rungs]
    shown.sort(key=lambda record: (record.number in front.trial_numbers, record.number))
    figure: go.Figure = make_subplots(
        rows=1,
        cols=len(front.objectives),
        horizontal_spacing=0.06,
        column_titles=[abbreviate_parameter(goal.name) for goal in front.objectives],
    )
    modes: set[str] = set()
    for record in shown[-MAX_TRIALS:]:
        mode, strong = get_mode(record.params), record.number in front.trial_numbers
        for column, goal in enumerate(front.objectives, start=1):
            legend = column == 1 and strong and mode not in modes
            curve = _trace_curve(record, goal.name, strong=strong, legend=legend)
            figure.add_trace(curve, row=1, col=column)
            modes |= {mode} if legend else set()
    figure.update_layout(**make_layout(360, t=72))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="on validation prompts", col=1)
    return figure


def _trace_curve(record: TrialRecord, objective: str, *, strong: bool, legend: bool) -> go.Scatter:
    mode = get_mode(record.params)
    mark = style.get_mark(mode)
    line = make_curve_line(mark.color, strong=strong)
    rungs = [rung for rung in record.rungs if objective in rung.validation]
    symbols = [mark.plotly] * len(rungs)
    if record.state == "pruned" and symbols:
        symbols[-1] = "x"
    return go.Scatter(
        x=[rung.step for rung in rungs],
        y=[rung.validation[objective].mean for rung in rungs],
        mode="lines+markers",
        line=line,
        marker={"symbol": symbols, "size": 7 if strong else 5, "color": line["color"]},
        name=mode,
        legendgroup=mode,
        showlegend=legend,
        hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.3f}}<extra></extra>",
    )
