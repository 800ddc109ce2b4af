"""Figures of trials over steps and time: training curves, rungs and hypervolume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.text import abbreviate_parameter, get_mode
from gdpo_tune.core.trial_files import REWARDS, read_steps
from gdpo_tune.core.trials import Measurement, TrialRecord, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import choose_time_unit, make_layout

REWARD = f"train/{REWARDS}"
MAX_CURVES, MAX_RUNG_CURVES = 60, 120
"""Most trials that are drawn: those on the front first, then the latest."""
WINDOW = 5
"""Steps that a curve is averaged over."""
REWARD_ROWS = {"mean": "mean reward", "frac_reward_zero_std": "dead groups"}
"""Metric of each reward -> title of its row."""
CROWDED = 60
"""Trials above which the marks along the hypervolume are smaller."""
ENDED_MARKS = {
    "complete": style.Mark("#0072b2", "circle", "o"),
    "replicate": style.Mark("#e69f00", "diamond", "D"),
    **{role: mark for role, (_, mark) in style.CANDIDATES.items()},
    "failed or stopped": style.Mark("#d55e00", "x", "X"),
}
"""Kind of a trial that ended -> its mark along the hypervolume."""
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
    """Draw each reward's mean, and the share of groups that teach nothing, in a column.

    Curves are running means over `WINDOW` steps; the front's trials are strong. `steps` is not
    empty.
    """
    rewards = list_rewards(steps)
    figure: go.Figure = make_subplots(
        rows=len(REWARD_ROWS),
        cols=max(len(rewards), 1),
        shared_xaxes=True,
        vertical_spacing=0.08,
        horizontal_spacing=0.06,
        column_titles=[abbreviate_parameter(name) for name in rewards],
    )
    shown = _sort_by_front(front, (r for r in front.records if r.number in steps))
    for record in shown[-MAX_CURVES:]:
        mode, title = get_mode(record.params), f"trial {record.number}"
        line = _make_line(mode, strong=record.number in front.trial_numbers)
        for column, reward in enumerate(rewards, start=1):
            for row, kind in enumerate(REWARD_ROWS, start=1):
                metric = f"{REWARD}{reward}/{kind}"
                measured = [step for step in steps[record.number] if metric in step.metrics]
                values = [step.metrics[metric] for step in measured]
                windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
                figure.add_scatter(
                    x=[step.step for step in measured],
                    y=[sum(window) / len(window) for window in windows],
                    mode="lines",
                    name=title,
                    hovertemplate=f"{title}, step %{{x}}: %{{y:.4~g}}<extra></extra>",
                    showlegend=False,
                    legendgroup=mode,
                    line=line,
                    row=row,
                    col=column,
                )
    for mode in sorted({get_mode(record.params) for record in shown}):
        line = _make_line(mode, strong=True)
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=mode, legendgroup=mode)
    figure.update_layout(**make_layout(520, t=72))
    for row, title in enumerate(REWARD_ROWS.values(), start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(REWARD_ROWS))
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
        line = _make_line(mode, strong=strong)
        for column, goal in enumerate(front.objectives, start=1):
            rungs = [rung for rung in record.rungs if goal.name in rung.validation]
            symbols = [style.get_mark(mode).plotly] * len(rungs)
            if record.state == "pruned" and symbols:
                symbols[-1] = "x"
            figure.add_scatter(
                x=[rung.step for rung in rungs],
                y=[rung.validation[goal.name].mean for rung in rungs],
                mode="lines+markers",
                line=line,
                marker={"symbol": symbols, "size": 7 if strong else 5, "color": line["color"]},
                name=mode,
                legendgroup=mode,
                showlegend=column == 1 and strong and mode not in modes,
                hovertemplate=f"trial {record.number}, step %{{x}}: %{{y:.4~g}}<extra></extra>",
                row=1,
                col=column,
            )
        modes |= {mode} if strong else set()
    figure.update_layout(**make_layout(360, t=72))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="on validation prompts", col=1)
    return figure


def _sort_by_front(front: Front, records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the records by number, those on the front last: what comes later lies on top."""
    return sorted(records, key=lambda r: (r.number in front.trial_numbers, r.number))


def _make_line(mode: str, *, strong: bool) -> dict[str, Any]:
    color = style.get_mark(mode).color
    return {"color": color if strong else style.fade(color, 0.3), "width": 2 if strong else 1}


def draw_hypervolume(front: Front, gpus: float = 0.0) -> go.Figure:
    """Draw the front's hypervolume after each trial that ended, in order of ending.

    Three panels: over trials, over time since the first start, and over GPU time of all trials that
    had ended by then, or CPU time without a GPU. Replicates are marked: the curve may fall
    there, when they correct a lucky first trial. A failed or stopped trial leaves it level.

    `front.hypervolume_over_trials` is not empty; `gpus` are those of one trial.
    """
    records = {record.number: record for record in front.records}
    ended = [records[point.number] for point in front.hypervolume_over_trials]
    values = [point.hypervolume for point in front.hypervolume_over_trials]
    zero = min((r.started for r in front.records if r.started is not None), default=0.0)
    work = [r.cost.seconds * gpus if gpus else r.cost.cpu_seconds for r in ended]
    times = [(r.finished or zero) - zero for r in ended]
    processor = "GPU" if gpus else "CPU"
    axes = {"trials ended": [float(count) for count in range(1, len(ended) + 1)]}
    spans = {"{} since the first start": times, f"{processor}-{{}}": list(accumulate(work))}
    for title, seconds in spans.items():
        length, unit = choose_time_unit(max(seconds))
        axes[title.format(unit)] = [value / length for value in seconds]
    kinds = [_classify(record) for record in ended]
    figure: go.Figure = make_subplots(
        rows=1, cols=len(axes), shared_yaxes=True, horizontal_spacing=0.03
    )
    line = {"color": style.INK, "width": 1.6, "shape": "hv"}
    size = 7 if len(ended) <= CROWDED else 4
    for column, (title, x) in enumerate(axes.items(), start=1):
        cell: dict[str, Any] = {"row": 1, "col": column}
        figure.add_scatter(
            x=x, y=values, mode="lines", line=line, hoverinfo="skip", showlegend=False, **cell
        )
        for name, mark in ENDED_MARKS.items():
            indices = [index for index, kind in enumerate(kinds) if kind == name]
            if indices:
                figure.add_scatter(
                    x=[x[index] for index in indices],
                    y=[values[index] for index in indices],
                    mode="markers",
                    marker={"symbol": mark.plotly, "color": mark.color, "size": size},
                    text=[title_candidate(ended[index].name) for index in indices],
                    hovertemplate="%{text}: hypervolume %{y:.4~g} at %{x:.3~g}<extra></extra>",
                    name=name,
                    legendgroup=name,
                    showlegend=column == 1,
                    **cell,
                )
        figure.update_xaxes(title_text=title, rangemode="tozero", **cell)
    figure.update_layout(**make_layout(330))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="hypervolume", col=1)
    return figure


def _classify(record: TrialRecord) -> str:
    """Return a key of `ENDED_MARKS`."""
    if record.state != "complete":
        return "failed or stopped"
    return record.role if record.role in ENDED_MARKS else "complete"
