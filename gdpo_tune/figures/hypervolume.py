"""Hypervolume against trials, time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.costs import HOUR, gpu_hours
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

CROWDED = 60
"""Trials above which the marks are smaller."""


def draw_hypervolume(front: Front, gpus: float = 0.0) -> go.Figure:
    """Draw the front's hypervolume after each trained trial that ended, in order of ending.

    Three panels: over trials, over hours since the first start, and over GPU-hours of all trials
    that had ended by then, or CPU-hours without a GPU. Replicates are marked: the curve may fall
    there, when they correct a lucky first trial. A failed or stopped trial leaves it level.

    Args:
        front: with at least one point of `hypervolume_over_trials`.
        gpus: GPUs of one trial.
    """
    trace = front.hypervolume_over_trials
    record_of = {record.number: record for record in front.records}
    ended = [record_of[point.number] for point in trace]
    values = [point.hypervolume for point in trace]
    axes = [
        ("trials ended", [float(count) for count in range(1, len(trace) + 1)]),
        ("hours since the first start", _list_hours(front.records, ended)),
        ("GPU-hours" if gpus else "CPU-hours", _accumulate_work(ended, gpus)),
    ]
    figure: go.Figure = make_subplots(
        rows=1, cols=len(axes), shared_yaxes=True, horizontal_spacing=0.03
    )
    for column, (title, places) in enumerate(axes, start=1):
        for curve in _trace_curves(ended, places, values, legend=column == 1):
            figure.add_trace(curve, row=1, col=column)
        figure.update_xaxes(title_text=title, rangemode="tozero", row=1, col=column)
    figure.update_layout(**base_layout(330))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="hypervolume", col=1)
    return figure


def _list_hours(records: Sequence[TrialRecord], ended: Sequence[TrialRecord]) -> list[float]:
    started = [record.started for record in records if record.started is not None]
    zero = min(started, default=0.0)
    return [((record.finished or zero) - zero) / HOUR for record in ended]


def _accumulate_work(ended: Sequence[TrialRecord], gpus: float) -> list[float]:
    """Return the hours of work in the trials that had ended by each point."""
    spent = [gpu_hours(r.cost, gpus) if gpus else r.cost.cpu_seconds / HOUR for r in ended]
    return list(accumulate(spent))


def _trace_curves(
    ended: Sequence[TrialRecord], places: Sequence[float], values: Sequence[float], *, legend: bool
) -> list[go.Scatter]:
    line = {"color": style.INK, "width": 1.6, "shape": "hv"}
    curves = [
        go.Scatter(x=places, y=values, mode="lines", line=line, hoverinfo="skip", showlegend=False)
    ]
    kinds = [
        ("search", "complete", style.Mark("#0072b2", "circle", "o")),
        ("replicate", "replicate", style.Mark("#e69f00", "diamond", "D")),
        ("ended", "failed or stopped", style.Mark("#d55e00", "x", "X")),
    ]
    for kind, name, mark in kinds:
        indices = [index for index, record in enumerate(ended) if _classify(record) == kind]
        if indices:
            size = 7 if len(ended) <= CROWDED else 4
            curves.append(
                go.Scatter(
                    x=[places[index] for index in indices],
                    y=[values[index] for index in indices],
                    mode="markers",
                    marker={"symbol": mark.plotly, "color": mark.color, "size": size},
                    text=[f"trial {ended[index].number}" for index in indices],
                    hovertemplate="%{text}: hypervolume %{y:.4f} at %{x:.3~g}<extra></extra>",
                    name=name,
                    legendgroup=name,
                    showlegend=legend,
                )
            )
    return curves


def _classify(record: TrialRecord) -> str:
    if record.state != "complete":
        return "ended"
    return "replicate" if record.role == "replicate" else "search"
