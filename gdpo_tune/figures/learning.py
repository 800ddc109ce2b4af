"""Training curves of every reward: its mean, and the share of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import abbreviate_parameter, get_mode
from gdpo_tune.core.steps import read_steps
from gdpo_tune.core.trials import Measurement, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_curve_line, make_layout

REWARD = "train/reward/"
MAX_CURVES = 60
"""Trials that are drawn: those on the front first, then the latest."""
WINDOW = 5
"""Steps that a curve is averaged over."""
ROWS = (("mean", "mean reward"), ("dead_groups", "dead groups"))

Steps = Mapping[int, Sequence[Measurement]]
"""Trial number -> its steps, at least one."""


def read_all_steps(records: Sequence[TrialRecord]) -> Steps:
    """Return the steps of the trials that have any."""
    steps = {r.number: read_steps(r.directory) for r in records if r.directory is not None}
    return {number: measured for number, measured in steps.items() if measured}


def list_rewards(steps: Steps) -> list[str]:
    """Return the rewards that any trial reports, in the order of their first appearance."""
    metrics = {name: None for measured in steps.values() for name in measured[0].metrics}
    return [
        name.removeprefix(REWARD).removesuffix("/mean")
        for name in metrics
        if name.startswith(REWARD) and name.endswith("/mean")
    ]


def draw_learning(front: Front, steps: Steps) -> go.Figure:
    """Draw one column per reward: running means over `WINDOW` steps, the front's trials strong.

    Args:
        front: its records are drawn.
        steps: not empty.
    """
    rewards = list_rewards(steps)
    figure: go.Figure = make_subplots(
        rows=len(ROWS),
        cols=max(len(rewards), 1),
        shared_xaxes=True,
        vertical_spacing=0.08,
        horizontal_spacing=0.06,
        column_titles=[abbreviate_parameter(name) for name in rewards],
    )
    shown = [record for record in front.records if record.number in steps]
    # Faint ones first, so that they lie behind.
    shown.sort(key=lambda record: (record.number in front.trial_numbers, record.number))
    for record in shown[-MAX_CURVES:]:
        color = style.get_mark(get_mode(record.params)).color
        line = make_curve_line(color, strong=record.number in front.trial_numbers)
        for column, reward in enumerate(rewards, start=1):
            for row, (kind, _) in enumerate(ROWS, start=1):
                curve = _trace_curve(record, steps[record.number], f"{REWARD}{reward}/{kind}")
                figure.add_trace(curve.update(line=line), row=row, col=column)
    for mode in sorted({get_mode(record.params) for record in shown}):
        line = make_curve_line(style.get_mark(mode).color, strong=True)
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=mode, legendgroup=mode)
    figure.update_layout(**make_layout(520, t=72))
    for row, (_, title) in enumerate(ROWS, start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(ROWS))
    return figure


def _trace_curve(record: TrialRecord, steps: Sequence[Measurement], metric: str) -> go.Scatter:
    measured = [step for step in steps if metric in step.metrics]
    values = [step.metrics[metric] for step in measured]
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return go.Scatter(
        x=[step.step for step in measured],
        y=[sum(window) / len(window) for window in windows],
        mode="lines",
        name=f"trial {record.number}",
        hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.3f}}<extra></extra>",
        showlegend=False,
        legendgroup=get_mode(record.params),
    )
