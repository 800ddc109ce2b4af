"""Curves of trials over their steps: rewards, values at rungs, and parameters of a population."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.text import abbreviate_parameter, format_parameter, get_mode
from gdpo_tune.core.trial_files import REWARDS, read_steps
from gdpo_tune.core.trials import Measurement, ParamValue, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import make_layout

REWARD = f"train/{REWARDS}"
MAX_CURVES, MAX_RUNG_CURVES = 60, 120
"""Most trials that are drawn: those on the front first, then the latest."""
WINDOW = 5
"""Steps that a curve is averaged over."""
KINDS = {"mean": "mean reward", "frac_reward_zero_std": "dead groups"}
"""Metric of each reward -> title of its row."""
ROW = 150
"""Height of the row of one parameter, in pixels."""

Steps = Mapping[int, Sequence[Measurement]]
"""Trial number -> its steps, at least one."""
Value = tuple[int, ParamValue, str]
"""Step from which a value holds, the value, and ` from 3` if trial 3 was copied for it."""


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
    """Draw each reward's mean, and the share of groups that teach nothing, in a column.

    Curves are running means over `WINDOW` steps; the front's trials are strong. `steps` is not
    empty.
    """
    rewards = list_rewards(steps)
    figure: go.Figure = make_subplots(
        rows=len(KINDS),
        cols=max(len(rewards), 1),
        shared_xaxes=True,
        vertical_spacing=0.08,
        horizontal_spacing=0.06,
        column_titles=[abbreviate_parameter(name) for name in rewards],
    )
    shown = _sort_by_front(front, (r for r in front.records if r.number in steps))
    for record in shown[-MAX_CURVES:]:
        line = _make_line(get_mode(record.params), strong=record.number in front.trial_numbers)
        for column, reward in enumerate(rewards, start=1):
            for row, kind in enumerate(KINDS, start=1):
                curve = _trace_metric(record, steps[record.number], f"{REWARD}{reward}/{kind}")
                figure.add_trace(curve.update(line=line), row=row, col=column)
    for mode in sorted({get_mode(record.params) for record in shown}):
        line = _make_line(mode, strong=True)
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=mode, legendgroup=mode)
    figure.update_layout(**make_layout(520, t=72))
    for row, title in enumerate(KINDS.values(), start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(KINDS))
    return figure


def draw_rungs(front: Front) -> go.Figure:
    """Draw validation values at rungs, a panel per objective; a cross is an early stop."""
    figure: go.Figure = make_subplots(
        rows=1,
        cols=len(front.objectives),
        horizontal_spacing=0.06,
        column_titles=[abbreviate_parameter(goal.name) for goal in front.objectives],
    )
    modes: set[str] = set()
    shown = _sort_by_front(front, (r for r in front.records if r.rungs and r.is_training))
    for record in shown[-MAX_RUNG_CURVES:]:
        mode, strong = get_mode(record.params), record.number in front.trial_numbers
        for column, goal in enumerate(front.objectives, start=1):
            legend = column == 1 and strong and mode not in modes
            curve = _trace_rungs(record, goal.name, strong=strong, legend=legend)
            figure.add_trace(curve, row=1, col=column)
        modes |= {mode} if strong else set()
    figure.update_layout(**make_layout(360, t=72))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="on validation prompts", col=1)
    return figure


def draw_population(front: Front) -> go.Figure:
    """Draw one row per parameter and one line per member, with a dot where it copied another.

    Some member has to have copied another one.
    """
    members = [record for record in front.records if record.role == "member"]
    names = list(dict.fromkeys(n for r in members for e in r.lineage for n in e.params))
    members = _sort_by_front(front, members)
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


def _sort_by_front(front: Front, records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the records by number, those on the front last: what comes later lies on top."""
    return sorted(records, key=lambda r: (r.number in front.trial_numbers, r.number))


def _make_line(mode: str, *, strong: bool) -> dict[str, Any]:
    color = style.get_mark(mode).color
    return {"color": color if strong else style.fade(color, 0.3), "width": 2 if strong else 1}


def _trace_metric(record: TrialRecord, steps: Sequence[Measurement], metric: str) -> go.Scatter:
    measured = [step for step in steps if metric in step.metrics]
    values = [step.metrics[metric] for step in measured]
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return go.Scatter(
        x=[step.step for step in measured],
        y=[sum(window) / len(window) for window in windows],
        mode="lines",
        name=f"trial {record.number}",
        hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.4~g}}<extra></extra>",
        showlegend=False,
        legendgroup=get_mode(record.params),
    )


def _trace_rungs(record: TrialRecord, objective: str, *, strong: bool, legend: bool) -> go.Scatter:
    mode = get_mode(record.params)
    line = _make_line(mode, strong=strong)
    rungs = [rung for rung in record.rungs if objective in rung.validation]
    symbols = [style.get_mark(mode).plotly] * len(rungs)
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
        hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.4~g}}<extra></extra>",
    )


def _list_values(record: TrialRecord, name: str, last: int) -> list[Value]:
    """Return the initial value, each one that was taken over, and the last again at the end."""
    taken = [(e.step, e.params[name], f" from {e.donor}") for e in record.lineage]
    points = [(0, record.params[name], ""), *taken]
    return [*points, (max(last, points[-1][0]), points[-1][1], "")]


def _trace_member(record: TrialRecord, points: Sequence[Value], *, strong: bool) -> go.Scatter:
    line = _make_line(get_mode(record.params), strong=strong)
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
