"""How reward weights and learning rate of a population's members moved while they trained."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import abbreviate, format_parameter, mode_of
from gdpo_tune.core.trials import ParamValue, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

Value = tuple[int, ParamValue, str]
"""From which step on, what, and from whom."""

ROW = 150
"""Height of the values of one parameter in pixels."""


def has_moved(records: Sequence[TrialRecord]) -> bool:
    """Whether some member took over from another one."""
    return any(record.lineage for record in records)


def population_figure(front: Front) -> go.Figure:
    """One row a parameter, one line a member, a mark where it took over; the front is strong.

    Args:
        front: of a sweep in which some member has taken over.
    """
    members = [record for record in front.records if record.role == "member"]
    names = list(dict.fromkeys(n for r in members for e in r.lineage for n in e.params))
    strong = {number for member in front.members for number in member.numbers}
    members.sort(key=lambda record: (record.number in strong, record.number))
    last = max(rung.step for record in members for rung in record.rungs)
    figure: go.Figure = make_subplots(
        rows=len(names), cols=1, shared_xaxes=True, vertical_spacing=0.2 / len(names)
    )
    for row, name in enumerate(names, start=1):
        values = [_values(record, name, last) for record in members]
        for record, known in zip(members, values, strict=True):
            line = _line(record, known)
            color = style.mark_of(mode_of(record.params)).color
            kept = record.number in strong
            line.update(
                line={"color": color if kept else style.faded(color, 0.35), "width": 1 + kept},
                marker={"color": color if kept else style.faded(color, 0.5), "size": 7},
            )
            figure.add_trace(line, row=row, col=1)
        positive = all(float(value) > 0 for known in values for _, value, _ in known)
        kind = "log" if positive else "linear"
        figure.update_yaxes(title_text=abbreviate(name), type=kind, row=row, col=1)
    figure.update_layout(**base_layout(ROW * len(names) + 90, {"l": 84, "r": 16, "t": 24, "b": 52}))
    figure.update_xaxes(title_text="step", row=len(names))
    return figure


def _values(record: TrialRecord, name: str, last: int) -> list[Value]:
    """The initial value, each one that was taken over, and the last again at the end."""
    taken = [(e.step, e.params[name], f" from {e.donor}") for e in record.lineage]
    points = [(0, record.params[name], ""), *taken]
    return [*points, (max(last, points[-1][0]), points[-1][1], "")]


def _line(record: TrialRecord, points: Sequence[Value]) -> go.Scatter:
    return go.Scatter(
        x=[step for step, _, _ in points],
        y=[value for _, value, _ in points],
        mode="lines+markers",
        line_shape="hv",
        marker_symbol=["circle" if origin else "line-ns" for _, _, origin in points],
        text=[
            f"trial {record.number}{origin}, step {step}: {format_parameter(value)}"
            for step, value, origin in points
        ],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
