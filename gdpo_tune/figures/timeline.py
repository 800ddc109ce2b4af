"""Timeline of the trials, and how well the slots were used."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from gdpo_tune.core.text import format_duration, format_percent
from gdpo_tune.core.trials import TrialRecord, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.figures.layout import choose_time_unit, make_layout

KINDS = {
    "complete": ("complete", "#0072b2"),
    "replicate": ("replicate", "#e69f00"),
    **{role: (name, mark.color) for role, (name, mark) in style.CANDIDATES.items()},
    "pruned": ("stopped early", "#56b4e9"),
    "failed": ("failed", "#d55e00"),
    "open": ("unfinished", "#7f7f7f"),
}


def draw_timeline(records: Sequence[TrialRecord]) -> go.Figure:
    """Draw a bar per trial from its start to its end, in as few rows as trials ran side by side.

    A trial that waited at a rung or resumed in a later session has one bar over all of that time.
    At least one of `records` has started.
    """
    shown = sorted((r for r in records if r.started is not None), key=lambda r: r.started or 0.0)
    now = max(r.finished or r.started or 0.0 for r in shown)
    spans = [(r.started or 0.0, r.finished or now) for r in shown]
    slots = _assign_slots(spans)
    unit, unit_name = choose_time_unit(now - spans[0][0])
    figure = go.Figure()
    for kind, (name, color) in KINDS.items():
        bars = [bar for bar in zip(shown, spans, slots, strict=True) if _classify(bar[0]) == kind]
        if bars:
            figure.add_bar(
                x=[(end - start) / unit for _, (start, end), _ in bars],
                y=[slot for _, _, slot in bars],
                base=[(start - spans[0][0]) / unit for _, (start, _), _ in bars],
                orientation="h",
                name=name,
                marker={"color": color, "line": {"color": style.PAPER, "width": 1}},
                text=[
                    f"{title_candidate(record.name)}, ran for "
                    f"{format_duration(record.cost.seconds)}"
                    for record, _, _ in bars
                ],
                textposition="none",
                hovertemplate="%{text}<extra>" + name + "</extra>",
            )
    height = 130 + 26 * min(max(slots) + 1, 24)
    figure.update_layout(**make_layout(height), barmode="overlay", bargap=0.2)
    figure.update_xaxes(title_text=f"{unit_name} since the first start")
    figure.update_yaxes(title_text="slot", showticklabels=False, ticks="", autorange="reversed")
    return figure


def describe_utilisation(
    records: Sequence[TrialRecord], sessions: Sequence[Mapping[str, Any]]
) -> str:
    """Return sentences on how much of the slots' time trials used; empty without sessions."""
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
    if not offered:
        return ""
    spent = sum(record.cost.seconds for record in records)
    return (
        f"Slot utilisation: {format_percent(min(1.0, spent / offered))}. Trials ran for "
        f"{format_duration(spent)}; slots were available for {format_duration(offered)}. The rest "
        "is process start-up, the search, and slots that were idle at the end."
    )


def _assign_slots(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each span, in order of start, the first slot that is free."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    slots: list[int] = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, slot))
        slots.append(slot)
    return slots


def _classify(record: TrialRecord) -> str:
    if record.state == "complete":
        return record.role if record.role in KINDS else "complete"
    return record.state if record.state in ("pruned", "failed") else "open"
