"""When each trial ran, and how well the slots were used."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from gdpo_tune.core.costs import HOUR
from gdpo_tune.core.formatting import format_duration
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import base_layout

KINDS = (
    ("complete", "complete", "#0072b2"),
    ("replicate", "replicate", "#e69f00"),
    ("pruned", "stopped early", "#56b4e9"),
    ("failed", "failed", "#d55e00"),
    ("open", "unfinished", "#7f7f7f"),
)


def timeline_figure(records: Sequence[TrialRecord]) -> go.Figure:
    """A bar a trial from its start to its end, in as few lanes as trials ran side by side.

    A trial that waited at a rung or went on in a later session has one bar over all of that time.

    Args:
        records: at least one has started.
    """
    shown = sorted((r for r in records if r.started is not None), key=lambda r: r.started or 0.0)
    zero = shown[0].started or 0.0
    now = max(r.finished or r.started or 0.0 for r in shown)
    lanes = _lanes([(r.started or 0.0, r.finished or now) for r in shown])
    figure = go.Figure()
    for kind, name, color in KINDS:
        chosen = [(r, lane) for r, lane in zip(shown, lanes, strict=True) if _kind(r) == kind]
        if chosen:
            figure.add_trace(_bars(chosen, zero, now, name, color))
    height = 130 + 26 * min(max(lanes) + 1, 24)
    figure.update_layout(
        **base_layout(height, {"l": 64, "r": 16, "t": 48, "b": 52}), barmode="overlay", bargap=0.2
    )
    figure.update_xaxes(title_text="hours since the first start")
    figure.update_yaxes(title_text="lane", showticklabels=False, ticks="", autorange="reversed")
    return figure


def utilisation(records: Sequence[TrialRecord], sessions: Sequence[Mapping[str, Any]]) -> str:
    """How much of the slots' time went into trials, in a sentence; nothing without sessions."""
    ends = [r.finished for r in records if r.finished is not None]
    if not sessions or not ends:
        return ""
    offered = 0.0
    for session, following in zip(sessions, [*sessions[1:], None], strict=True):
        # A session that was killed has no end: the last trial that ended before the next began.
        until = following["started"] if following else float("inf")
        last = max((end for end in ends if session["started"] < end <= until), default=None)
        finished = session.get("finished", last)
        if finished is not None:
            offered += (finished - session["started"]) * session["slots"]
    spent = sum(record.cost.seconds for record in records)
    if not offered:
        return ""
    return (
        f"Trials worked for {format_duration(spent)} of the {format_duration(offered)} that their "
        f"slots were there: {min(1.0, spent / offered):.0%}. The rest is the start of processes, "
        "the search, and slots that waited at the end."
    )


def _bars(
    chosen: Sequence[tuple[TrialRecord, int]], zero: float, now: float, name: str, color: str
) -> go.Bar:
    starts = [((r.started or zero) - zero) / HOUR for r, _ in chosen]
    spans = [((r.finished or now) - (r.started or zero)) / HOUR for r, _ in chosen]
    return go.Bar(
        y=[lane for _, lane in chosen],
        x=spans,
        base=starts,
        orientation="h",
        name=name,
        marker={"color": color, "line": {"color": style.PAPER, "width": 1}},
        text=[f"trial {r.number}, {format_duration(r.cost.seconds)} of work" for r, _ in chosen],
        textposition="none",
        hovertemplate="%{text}<extra>" + name + "</extra>",
    )


def _lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each span, by start, the first lane that is free."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes: list[int] = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def _kind(record: TrialRecord) -> str:
    if record.state == "complete":
        return "replicate" if record.role == "replicate" else "complete"
    return record.state if record.state in ("pruned", "failed") else "open"
