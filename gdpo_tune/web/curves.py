"""Curves of the running trials: objectives on validation prompts, and mean rewards by step.

The figures are plain data, because they are made again whenever a trial has reported a step, and
plotly's own objects cost many times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from plotly.subplots import make_subplots

from gdpo_tune.core.formatting import abbreviate_parameter
from gdpo_tune.core.steps import REWARDS, is_kept
from gdpo_tune.core.trials import Measurement, Objective, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.curves import list_rewards
from gdpo_tune.figures.layout import make_layout

MOST_CURVES = 12
"""Most running trials that are drawn, the latest; the table has all of them."""
VALIDATION, TRAINING = "validation", "mean reward"
"""Titles of the rows."""
HEIGHT, HEIGHT_OF_ONE_ROW = 430, 260


def get_curve_color(record: TrialRecord, records: Sequence[TrialRecord]) -> str:
    """Return the colour of a running trial, in its curves and in the table; "" without curves."""
    drawn = [r.number for r in list_drawn(records)]
    if record.number not in drawn:
        return ""
    return style.REWARDS[drawn.index(record.number) % len(style.REWARDS)]


def list_drawn(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the running trials that have curves."""
    return [r for r in records if r.state == "running" and r.is_training][-MOST_CURVES:]


def draw_running(
    objectives: Sequence[Objective],
    records: Sequence[TrialRecord],
    steps: Mapping[int, Sequence[Measurement]],
    last: int,
) -> dict[str, Any] | None:
    """Draw a panel per objective, and under them one per reward; None without any point.

    `last` is the last step of a trial.
    """
    drawn = list_drawn(records)
    measured = {number: taken for number, taken in steps.items() if taken}
    if not any(record.rungs or record.number in measured for record in drawn):
        return None
    rewards = list_rewards(measured) if measured else []
    names = tuple(abbreviate_parameter(goal.name) for goal in objectives)
    layout = _build_layout(names, tuple(abbreviate_parameter(name) for name in rewards), last)
    data: list[dict[str, Any]] = []
    for record in drawn:
        color = get_curve_color(record, records)
        for column, goal in enumerate(objectives, start=1):
            data.append(_trace_rungs(record, goal.name, color, column))
        points = [m for m in measured.get(record.number, ()) if m.step]
        kept = [m for m in points if is_kept(m.step, points[-1].step)]
        for column, reward in enumerate(rewards, start=1):
            metric = f"train/{REWARDS}{reward}/mean"
            trace = _trace_metric(record, kept, metric, color, len(names) + column)
            data.append(trace)
    return {"data": data, "layout": layout}


@lru_cache(maxsize=8)
def _build_layout(
    objectives: tuple[str, ...], rewards: tuple[str, ...], last: int
) -> dict[str, Any]:
    columns, rows = max(len(objectives), len(rewards)), 2 if rewards else 1
    counts = (len(objectives), len(rewards))[:rows]
    figure = make_subplots(
        rows=rows,
        cols=columns,
        specs=[[{} if column < count else None for column in range(columns)] for count in counts],
        horizontal_spacing=0.06,
        vertical_spacing=0.2,
        subplot_titles=[*objectives, *rewards],
    )
    height = HEIGHT if rows == 2 else HEIGHT_OF_ONE_ROW
    figure.update_layout(**make_layout(height, t=36, b=44))
    figure.update_layout(showlegend=False)
    figure.update_annotations(font={"size": 12.5})
    figure.update_yaxes(title_text=VALIDATION, row=1, col=1)
    figure.update_xaxes(range=[0, last])
    figure.update_xaxes(title_text="step", row=rows)
    if rows == 2:
        figure.update_yaxes(title_text=TRAINING, row=2, col=1)
    return dict(figure.layout.to_plotly_json())


def _trace_rungs(record: TrialRecord, objective: str, color: str, panel: int) -> dict[str, Any]:
    rungs = [rung for rung in record.rungs if objective in rung.validation]
    xs = [rung.step for rung in rungs]
    ys = [rung.validation[objective].mean for rung in rungs]
    return _trace(record, xs, ys, color, panel) | {"mode": "lines+markers", "marker": {"size": 6}}


def _trace_metric(
    record: TrialRecord, steps: Sequence[Measurement], metric: str, color: str, panel: int
) -> dict[str, Any]:
    taken = [step for step in steps if metric in step.metrics]
    xs, ys = [step.step for step in taken], [step.metrics[metric] for step in taken]
    return _trace(record, xs, ys, color, panel)


def _trace(
    record: TrialRecord, xs: Sequence[int], ys: Sequence[float], color: str, panel: int
) -> dict[str, Any]:
    axis = "" if panel == 1 else str(panel)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(xs),
        "y": list(ys),
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "line": {"color": color, "width": 2},
        "name": f"trial {record.number}",
        "hovertemplate": f"trial {record.number}, step %{{x}}: %{{y:.3f}}<extra></extra>",
    }
