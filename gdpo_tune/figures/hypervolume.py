"""Hypervolume against trials, time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.trials import TrialRecord, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import choose_time_unit, make_layout

CROWDED = 60
"""Trials above which the marks are smaller."""
KINDS = {
    "complete": style.Mark("#0072b2", "circle", "o"),
    "replicate": style.Mark("#e69f00", "diamond", "D"),
    **{role: mark for role, (_, mark) in style.CANDIDATES.items()},
    "failed or stopped": style.Mark("#d55e00", "x", "X"),
}


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
    axes = {
        "trials ended": [float(count) for count in range(1, len(ended) + 1)],
        **_scale_times("{} since the first start", times),
        **_scale_times(f"{processor}-{{}}", list(accumulate(work))),
    }
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
        for name, mark in KINDS.items():
            indices = [index for index, record in enumerate(ended) if _classify(record) == name]
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


def _scale_times(title: str, seconds: Sequence[float]) -> dict[str, list[float]]:
    """Return times in the unit that suits the largest, under a title that names the unit."""
    length, name = choose_time_unit(max(seconds))
    return {title.format(name): [value / length for value in seconds]}


def _classify(record: TrialRecord) -> str:
    if record.state != "complete":
        return "failed or stopped"
    return record.role if record.role in KINDS else "complete"
