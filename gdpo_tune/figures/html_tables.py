"""The front and all trials as HTML tables; texts from outside are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.origins import summarize_origins
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_duration,
    format_estimate,
    format_number,
    format_parameter,
    format_percent,
    get_mode,
)
from gdpo_tune.core.trials import Objective, TrialRecord, title_candidate
from gdpo_tune.figures import style
from gdpo_tune.results.summary import ORIGINS, describe_role, name_state

Cell = tuple[str, str | float]
"""HTML of a cell, and its key for sorting."""

EMPTY: Cell = (NO_VALUE, "")


def build_table(
    kind: str, heads: Iterable[str], rows: Iterable[str], label: str, *, tall: bool = False
) -> str:
    """Return a table that scrolls sideways, and down if it is `tall`.

    `heads` are HTML without `<th>`, `rows` are HTML with `<tr>`; `label` names the table.
    """
    scroll = f'class="scroll{" tall" if tall else ""}" role="region" tabindex="0"'
    return (
        f'<div {scroll} aria-label="{escape(label, quote=True)}">'
        f'<table class="{kind}"><thead><tr>'
        + "".join(f'<th scope="col">{head}</th>' for head in heads)
        + "</tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table></div>"
    )


def build_front_table(front: Front) -> str:
    """Return one row per member, best in the first objective first, then the baselines.

    The page shows the knee, the extremes, the chosen one and the baselines, and all on request.
    """
    if not front.members and not front.baselines:
        return '<p class="empty">No trial is complete yet.</p>'
    heads = ["policy", *(abbreviate_parameter(goal.name) for goal in front.objectives), "notes"]
    others = [c for c in front.baselines if not c.is_on_front]
    rows = [_build_member_row(front, policy) for policy in (*front.members, *others)]
    if not front.members:
        rows.insert(0, f'<tr><td colspan="{len(heads)}">Nothing is on the front yet.</td></tr>')
    table = build_table("front", map(escape, heads), rows, "Policies on the front")
    count = len(front.members)
    button = (
        f'<button type="button" id="show-all" aria-expanded="true" data-count="{count}" hidden>'
        "</button>"
    )
    return table + button


def build_badges(front: Front, configuration: Configuration, *, ties: bool = False) -> str:
    """Return why a configuration stands out, as labels that do not wrap."""
    names = front.list_labels(configuration, ties=ties)
    names += ["untrained policy"] if configuration.role == "untrained" else []
    names += ["published weights"] if configuration.role == "published" else []
    if configuration.is_on_front and configuration.is_provisional:
        names.append("provisional")
    names += front.list_shortfalls(configuration)
    return "".join(f'<span class="badge {name.split()[0]}">{escape(name)}</span>' for name in names)


def build_trials_table(front: Front, dimensions: Sequence[str]) -> str:
    """Return one row per trial by number; a click on a heading sorts."""
    if not front.records:
        return '<p class="empty">No trial has started yet.</p>'
    others = [name for name in dimensions if name != "normalization"]
    heads = ["trial", "state", "normalization", *map(abbreviate_parameter, others)]
    heads += [abbreviate_parameter(goal.name) for goal in front.objectives]
    heads += ["time"]
    rows = [
        _build_trial_row(record, others, front.objectives, record.number in front.trial_numbers)
        for record in sorted(front.records, key=lambda record: record.number)
    ]
    buttons = (f'<button type="button">{escape(head)}</button>' for head in heads)
    return build_table("sortable", buttons, rows, "All trials", tall=True)


def build_origins_table(front: Front) -> str:
    """Return one row per kind of candidates; empty for a sweep with final policies alone."""
    origins = summarize_origins(front)
    if not origins:
        return ""
    heads = ["candidates", "trials", "on the front", "hypervolume", "share"]
    heads += ["completions in training", "completions in evaluations", "CPU time"]
    rows: list[str] = []
    for origin in origins:
        cost = origin.cost
        cells = [
            *(ORIGINS[origin.kind], str(origin.trials), str(origin.members)),
            *(format_number(origin.hypervolume), format_percent(origin.share)),
            *(f"{cost.completions:,}", f"{cost.evaluation_completions:,}"),
            format_duration(cost.cpu_seconds),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return build_table("origins", heads, rows, "Origins of the front")


def _build_member_row(front: Front, configuration: Configuration) -> str:
    is_trained, name = configuration.role != "untrained", escape(configuration.name, quote=True)
    title = escape(title_candidate(configuration.name)) if is_trained else "untrained"
    patch = _build_patch(style.get_configuration_mark(configuration).color) if is_trained else ""
    cells = [
        f'{patch}<button type="button" class="link" data-select="{name}">{title}</button>',
        *(format_estimate(configuration.mean[goal.name]) for goal in front.objectives),
        build_badges(front, configuration) or NO_VALUE,
    ]
    is_listed = not configuration.is_on_front or bool(front.list_labels(configuration))
    marks = " data-listed" if is_listed or configuration in front.baselines else ""
    kind = "" if configuration.is_on_front else ' class="off"'
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{kind} data-candidate="{name}"{marks}>{row}</tr>'


def _build_patch(color: str) -> str:
    return f'<i class="patch" style="background:{color}"></i>'


def _build_trial_row(
    record: TrialRecord, dimensions: Sequence[str], objectives: Sequence[Objective], on_front: bool
) -> str:
    # A merge has no parameters that led to it, and the untrained policy no use for its own.
    params = record.params if record.role != "untrained" else {}
    mode, seconds = get_mode(params), record.cost.seconds
    role = describe_role(record)
    role += f" ({record.proposer})" if role in ("search", "member") else ""
    own = f", trial {record.number}" if record.role == "checkpoint" else ""
    state = f'<span class="state {record.state}">{name_state(record.state)}</span>'
    notes = ["violates a constraint"] if record.feasible is False else []
    notes += ["unchanged: every gradient was 0"] if record.is_unchanged else []
    notes += [text for text in (record.reason, record.content) if text]
    cells: list[Cell] = [
        (
            f"{record.name}{' ★' if on_front else ''}<small>{escape(role)}{own}</small>",
            record.number,
        ),
        (state + "".join(f"<small>{escape(note)}</small>" for note in notes), record.state),
        (_build_patch(style.get_mark(mode).color) + escape(mode), mode) if params else EMPTY,
    ]
    cells += [
        (escape(format_parameter(params[name])), params[name]) if name in params else EMPTY
        for name in dimensions
    ]
    for objective in objectives:
        test, validation = record.test.get(objective.name), record.validation.get(objective.name)
        below = format_number(validation.mean, validation.se) if validation else NO_VALUE
        cell = (
            f"{format_estimate(test)}<small>validation {below}</small>",
            test.mean if test else "",
        )
        cells.append(cell if test or validation else EMPTY)
    cells.append((format_duration(seconds), seconds) if seconds else EMPTY)
    body = "".join(
        f'<td data-sort="{escape(str(key), quote=True)}">{html}</td>' for html, key in cells
    )
    mark = " class=front" if on_front else ""
    return f'<tr id="trial-{record.number}" data-state="{record.state}"{mark}>{body}</tr>'
