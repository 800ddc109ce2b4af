"""Training curves of every reward: its mean, and the share of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import abbreviate, mode_of
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout
from gdpo_tune.figures.step_curves import REWARD, reward_names

MAX_CURVES = 60
"""Trials that are drawn: those of the front first, then the latest."""
WINDOW = 5
"""Steps that a curve is averaged over."""
ROWS = (("mean", "mean reward"), ("dead_groups", "dead groups"))


def learning_figure(front: Front, steps: Mapping[int, Sequence[Measurement]]) -> go.Figure:
    """One column a reward; running means over `WINDOW` steps; trials of the front are strong.

    Args:
        front: which trials to draw and which of them are on the front.
        steps: trial number -> its steps, not empty.
    """
    rewards = reward_names(steps)
    strong = {number for member in front.members for number in member.numbers}
    figure: go.Figure = make_subplots(
        rows=len(ROWS),
        cols=max(len(rewards), 1),
        shared_xaxes=True,
        vertical_spacing=0.08,
        horizontal_spacing=0.06,
        column_titles=[abbreviate(name) for name in rewards],
    )
    for record in _chosen(front, steps, strong):
        for column, reward in enumerate(rewards, start=1):
            for row, (kind, _) in enumerate(ROWS, start=1):
                curve = _curve(record, steps[record.number], f"{REWARD}{reward}/{kind}")
                curve.update(line=_line(record, record.number in strong))
                figure.add_trace(curve, row=row, col=column)
    _add_legend(
        figure, {mode_of(record.params) for record in front.records if record.number in steps}
    )
    figure.update_layout(**base_layout(520, {"l": 64, "r": 16, "t": 72, "b": 52}))
    for row, (_, title) in enumerate(ROWS, start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(ROWS))
    return figure


def _chosen(
    front: Front, steps: Mapping[int, Sequence[Measurement]], strong: set[int]
) -> list[TrialRecord]:
    """At most `MAX_CURVES` trials, faint ones first so that they lie behind."""
    known = [record for record in front.records if record.number in steps]
    known.sort(key=lambda record: (record.number in strong, record.number))
    return known[-MAX_CURVES:]


def _curve(record: TrialRecord, steps: Sequence[Measurement], metric: str) -> go.Scatter:
    found = [(step.step, step.metrics[metric]) for step in steps if metric in step.metrics]
    values = [value for _, value in found]
    smooth = [
        sum(values[max(0, end - WINDOW) : end]) / len(values[max(0, end - WINDOW) : end])
        for end in range(1, len(values) + 1)
    ]
    return go.Scatter(
        x=[step for step, _ in found],
        y=smooth,
        mode="lines",
        name=f"trial {record.number}",
        hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.3f}}<extra></extra>",
        showlegend=False,
        legendgroup=mode_of(record.params),
    )


def _line(record: TrialRecord, strong: bool) -> dict[str, object]:
    color = style.mark_of(mode_of(record.params)).color
    return (
        {"color": color, "width": 2} if strong else {"color": style.faded(color, 0.3), "width": 1}
    )


def _add_legend(figure: go.Figure, modes: set[str]) -> None:
    for mode in sorted(modes):
        line = {"color": style.mark_of(mode).color, "width": 2}
        figure.add_trace(
            go.Scatter(x=[None], y=[None], mode="lines", line=line, name=mode, legendgroup=mode)
        )
