"""Curves of the running trials: objectives on validation prompts, and mean rewards by step.

The figures are plain data, because they are made again whenever a trial has reported a step, and
plotly's own objects cost many times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from plotly.subplots import make_subplots

from gdpo_tune.core.text import abbreviate_parameter
from gdpo_tune.core.trial_files import REWARDS, is_kept
from gdpo_tune.core.trials import Measurement, Objective, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.curves import list_rewards
from gdpo_tune.figures.layout import make_layout

MOST_CURVES = 12
"""Most running trials that are drawn, the latest; the table has all of them."""
VALIDATION, TRAINING = "validation", "mean reward"
"""Titles of the rows."""
HEIGHTS = (260, 430)
"""Height of a figure with one row of panels, and with two, in pixels."""


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
    taken = {record.number: steps.get(record.number, ()) for record in drawn}
    measured = {number: points for number, points in taken.items() if points}
    rewards = list_rewards(measured) if measured else []
    goals = [goal.name for goal in objectives if any(record.rungs for record in drawn)]
    if not goals and not rewards:
        return None
    titles = [tuple(map(abbreviate_parameter, names)) for names in (goals, rewards)]
    layout = _build_layout(*titles, last)
    data: list[dict[str, Any]] = []
    for record in drawn:
        color = get_curve_color(record, records)
        for panel, goal in enumerate(goals, start=1):
            data.append(_trace_rungs(record, goal, color, panel))
        points = [m for m in measured.get(record.number, ()) if m.step]
        kept = [m for m in points if is_kept(m.step, points[-1].step)]
        for panel, reward in enumerate(rewards, start=len(goals) + 1):
            metric = f"train/{REWARDS}{reward}/mean"
            data.append(_trace_metric(record, kept, metric, color, panel))
    return {"data": data, "layout": layout}


@lru_cache(maxsize=8)
def _build_layout(
    objectives: tuple[str, ...], rewards: tuple[str, ...], last: int
) -> dict[str, Any]:
    panels = [(VALIDATION, objectives), (TRAINING, rewards)]
    rows = [(title, names) for title, names in panels if names]
    columns = max(len(names) for _, names in rows)
    figure = make_subplots(
        rows=len(rows),
        cols=columns,
        specs=[[{} if c < len(names) else None for c in range(columns)] for _, names in rows],
        horizontal_spacing=0.06,
        vertical_spacing=0.2,
        subplot_titles=[name for _, names in rows for name in names],
    )
    figure.update_layout(**make_layout(HEIGHTS[len(rows) - 1], t=36, b=44))
    figure.update_layout(showlegend=False)
    figure.update_annotations(font={"size": 12.5})
    figure.update_xaxes(range=[0, last])
    figure.update_xaxes(title_text="step", row=len(rows))
    for row, (title, _) in enumerate(rows, start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
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
        "hovertemplate": f"trial {record.number}, step %{{x}}: %{{y:.4~g}}<extra></extra>",
    }
