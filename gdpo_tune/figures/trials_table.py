"""Every trial of a sweep as a table that sorts and filters, failures with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import (
    NOTHING,
    abbreviate,
    format_duration,
    format_parameter,
    mode_of,
)
from gdpo_tune.core.trials import Objective, TrialRecord
from gdpo_tune.figures.front_table import html_table, mode_cell, value_cell

Cell = tuple[str, str | float]
"""HTML of a cell, and what it is sorted by."""

EMPTY: Cell = (NOTHING, "")


def trials_table(front: Front, dimensions: Sequence[str]) -> str:
    """All trials in the order of their numbers; texts from outside are escaped."""
    if not front.records:
        return '<p class="empty">No trial has started yet.</p>'
    others = [name for name in dimensions if name != "normalization"]
    heads = ["trial", "state", "role", "normalization", *map(abbreviate, others)]
    heads += [abbreviate(goal.name) for goal in front.objectives]
    heads += ["constraints", "time", "note"]
    members = {number for member in front.members for number in member.numbers}
    rows = [
        _row(record, others, front.objectives, record.number in members)
        for record in sorted(front.records, key=lambda record: record.number)
    ]
    buttons = (f'<button type="button">{escape(head)}</button>' for head in heads)
    return html_table("sortable", buttons, rows)


def failures(front: Front) -> str:
    """Every failed trial with its reason, as a list."""
    return (
        '<ul class="failures">'
        + "".join(
            f"<li><b>trial {record.number}</b> {escape(record.reason or 'no reason recorded')}</li>"
            for record in front.records
            if record.state == "failed"
        )
        + "</ul>"
    )


def _row(
    record: TrialRecord, dimensions: Sequence[str], objectives: Sequence[Objective], on_front: bool
) -> str:
    trained = record.role != "untrained"
    mode = mode_of(record.params)
    cells: list[Cell] = [
        (f"{record.number}{' ★' if on_front else ''}", record.number),
        (f'<span class="state {record.state}">{record.state}</span>', record.state),
        _role(record),
        (mode_cell(mode), mode) if trained else EMPTY,
    ]
    cells += [_parameter(record, name) if trained else EMPTY for name in dimensions]
    cells += [_value(record, objective) for objective in objectives]
    cells += [_verdict(record), _time(record), (escape(record.reason), record.reason)]
    body = "".join(
        f'<td data-sort="{escape(str(key), quote=True)}">{html}</td>' for html, key in cells
    )
    return f'<tr data-state="{record.state}"{" class=front" if on_front else ""}>{body}</tr>'


def _role(record: TrialRecord) -> Cell:
    text = record.role
    if record.role == "replicate":
        text = f"replicate of {record.replicate_of}"
    elif record.role in ("search", "member"):
        text = f"{record.role} ({record.proposer})"
    return (escape(text), text)


def _parameter(record: TrialRecord, name: str) -> Cell:
    value = record.params.get(name)
    if value is None:
        return EMPTY
    return (escape(format_parameter(value)), value)


def _value(record: TrialRecord, objective: Objective) -> Cell:
    test, seen = record.test.get(objective.name), record.validation.get(objective.name)
    if test is None and seen is None:
        return EMPTY
    key = test.mean if test is not None else ""
    return (value_cell(test, seen), key)


def _verdict(record: TrialRecord) -> Cell:
    if record.feasible is None:
        return EMPTY
    return ("hold", 1) if record.feasible else ("broken", 0)


def _time(record: TrialRecord) -> Cell:
    if record.cost.seconds == 0:
        return EMPTY
    return (format_duration(record.cost.seconds), record.cost.seconds)
