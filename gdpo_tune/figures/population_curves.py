"""Reward weights and learning rates of a population's members over their training."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import abbreviate_parameter, format_parameter, get_mode
from gdpo_tune.core.trials import ParamValue, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_curve_line, make_layout

Value = tuple[int, ParamValue, str]
"""Step from which a value holds, the value, and ` from 3` if trial 3 was copied for it."""

ROW = 150
"""Height of the row of one parameter, in pixels."""


def draw_population(front: Front) -> go.Figure:
    """Draw one row per parameter and one line per member, with a dot where it copied another.

    Args:
        front: of a sweep in which some member has copied another one.
    """
    members = [record for record in front.records if record.role == "member"]
    names = list(dict.fromkeys(n for r in members for e in r.lineage for n in e.params))
    members.sort(key=lambda record: (record.number in front.trial_numbers, record.number))
    last = max(rung.step for record in members for rung in record.rungs)
    figure: go.Figure = make_subplots(
        rows=len(names), cols=1, shared_xaxes=True, vertical_spacing=0.2 / len(names)
    )
    for row, name in enumerate(names, start=1):
        values = [_list_values(record, name, last) for record in members]
        for record, points in zip(members, values, strict=True):
            strong = record.number in front.trial_numbers
            figure.add_trace(_trace_member(record, points, strong=strong), row=row, col=1)
        is_positive = all(float(value) > 0 for points in values for _, value, _ in points)
        kind = "log" if is_positive else "linear"
        figure.update_yaxes(title_text=abbreviate_parameter(name), type=kind, row=row, col=1)
    figure.update_layout(**make_layout(ROW * len(names) + 90, l=84, t=24))
    figure.update_xaxes(title_text="step", row=len(names))
    return figure


def _list_values(record: TrialRecord, name: str, last: int) -> list[Value]:
    """Return the initial value, each one that was taken over, and the last again at the end."""
    taken = [(e.step, e.params[name], f" from {e.donor}") for e in record.lineage]
    points = [(0, record.params[name], ""), *taken]
    return [*points, (max(last, points[-1][0]), points[-1][1], "")]


def _trace_member(record: TrialRecord, points: Sequence[Value], *, strong: bool) -> go.Scatter:
    line = make_curve_line(style.get_mark(get_mode(record.params)).color, strong=strong)
    symbols = ["circle" if origin else "line-ns" for _, _, origin in points]
    return go.Scatter(
        x=[step for step, _, _ in points],
        y=[value for _, value, _ in points],
        mode="lines+markers",
        line=line | {"shape": "hv"},
        marker={"symbol": symbols, "color": line["color"], "size": 7},
        text=[
            f"trial {record.number}{origin}, step {step}: {format_parameter(value)}"
            for step, value, origin in points
        ],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
