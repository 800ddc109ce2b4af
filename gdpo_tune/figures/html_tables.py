"""The front and all trials as HTML tables; texts from outside are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.origins import summarize_origins
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import (
    NO_VALUE,
    abbreviate_parameter,
    format_duration,
    format_estimate,
    format_number,
    format_parameter,
    format_percent,
    get_mode,
)
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord
from gdpo_tune.figures import style
from gdpo_tune.results.summary import describe_role, name_configuration

Cell = tuple[str, str | float]
"""HTML of a cell, and its key for sorting."""

NAMES = {"ends": "ends of trainings", "checkpoints": "checkpoints", "merges": "merges"}
"""Kind of candidates -> its name in the table."""
EMPTY: Cell = (NO_VALUE, "")


def build_table(kind: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table that scrolls: `heads` as HTML without `<th>`, `rows` as HTML with `<tr>`."""
    return (
        f'<div class="scroll tall"><table class="{kind}"><thead><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table></div>"
    )


def build_front_table(front: Front, dimensions: Sequence[str]) -> str:
    """Return one row per member, best in the first objective first, then the baselines."""
    if not front.members and not front.baselines:
        return '<p class="empty">No trial is complete yet.</p>'
    others = [name for name in dimensions if name != "normalization"]
    heads = ["configuration", "normalization", *map(abbreviate_parameter, others)]
    heads += [abbreviate_parameter(goal.name) for goal in front.objectives]
    heads += ["seeds", "P(front)"]
    rows = [_build_member_row(front, member, others) for member in front.members]
    rows += [_build_member_row(front, c, others) for c in front.baselines if not c.is_on_front]
    if not front.members:
        rows.insert(0, f'<tr><td colspan="{len(heads)}">Nothing is on the front yet.</td></tr>')
    return build_table("front", map(escape, heads), rows)


def build_trials_table(front: Front, dimensions: Sequence[str]) -> str:
    """Return one row per trial by number; a click on a heading sorts."""
    if not front.records:
        return '<p class="empty">No trial has started yet.</p>'
    others = [name for name in dimensions if name != "normalization"]
    heads = ["trial", "state", "role", "normalization", *map(abbreviate_parameter, others)]
    heads += [abbreviate_parameter(goal.name) for goal in front.objectives]
    heads += ["constraints", "time", "note"]
    rows = [
        _build_trial_row(record, others, front.objectives, record.number in front.trial_numbers)
        for record in sorted(front.records, key=lambda record: record.number)
    ]
    buttons = (f'<button type="button">{escape(head)}</button>' for head in heads)
    return build_table("sortable", buttons, rows)


def build_origins_table(front: Front) -> str:
    """Return one row per kind of candidates; empty for a sweep with ends of trainings alone."""
    origins = summarize_origins(front)
    if not origins:
        return ""
    heads = ["candidates", "trials", "on the front", "hypervolume", "share"]
    heads += ["completions in training", "completions in evaluations", "CPU time"]
    rows: list[str] = []
    for origin in origins:
        cost = origin.cost
        cells = [
            *(NAMES[origin.kind], str(origin.trials), str(origin.members)),
            *(format_number(origin.hypervolume), format_percent(origin.share)),
            *(f"{cost.completions:,}", f"{cost.evaluation_completions:,}"),
            format_duration(cost.cpu_seconds),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return build_table("origins", heads, rows)


def _build_member_row(front: Front, configuration: Configuration, dimensions: Sequence[str]) -> str:
    is_trained, has_params = configuration.role != "untrained", _has_params(configuration)
    names = front.list_labels(configuration, ties=True)
    if configuration.is_on_front and configuration.is_provisional:
        names.append("provisional")
    names += front.list_shortfalls(configuration)
    badges = "".join(
        f'<span class="badge {name.split()[0]}">{escape(name)}</span>' for name in names
    )
    cells = [f"{escape(name_configuration(configuration))}<small>{badges}</small>"]
    cells.append(_build_mode_cell(get_mode(configuration.params)) if has_params else NO_VALUE)
    cells += [
        escape(format_parameter(configuration.params.get(name) if has_params else None))
        for name in dimensions
    ]
    cells += [
        _build_value_cell(configuration.mean[goal.name], configuration.validation.get(goal.name))
        for goal in front.objectives
    ]
    probability = f"{configuration.probability:.2f}" if configuration.rank >= 0 else NO_VALUE
    cells += [str(configuration.seeds) if is_trained else NO_VALUE, probability]
    kind = "" if configuration.is_on_front else ' class="off"'
    return f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _has_params(shown: Configuration | TrialRecord) -> bool:
    """Return whether parameters led to it: a merge has none, and the untrained policy no use."""
    return shown.role != "untrained" and bool(shown.params)


def _build_mode_cell(mode: str) -> str:
    """Return the name of a mode beside a patch of its colour."""
    color = style.get_mark(mode).color
    return f'<i class="patch" style="background:{color}"></i>{escape(mode)}'


def _build_value_cell(test: Estimate | None, validation: Estimate | None) -> str:
    """Return a value on test prompts, and under it the one on validation prompts."""
    below = NO_VALUE if validation is None else format_number(validation.mean)
    return f"{format_estimate(test)}<small>validation {below}</small>"


def _build_trial_row(
    record: TrialRecord, dimensions: Sequence[str], objectives: Sequence[Objective], on_front: bool
) -> str:
    has_params = _has_params(record)
    mode, seconds = get_mode(record.params), record.cost.seconds
    role = describe_role(record)
    role += f" ({record.proposer})" if role in ("search", "member") else ""
    own = f"<small>trial {record.number}</small>" if record.role == "checkpoint" else ""
    cells: list[Cell] = [
        (f"{record.name}{' ★' if on_front else ''}{own}", record.number),
        (f'<span class="state {record.state}">{record.state}</span>', record.state),
        (escape(role), role),
        (_build_mode_cell(mode), mode) if has_params else EMPTY,
    ]
    params = record.params if has_params else {}
    cells += [
        (escape(format_parameter(params[name])), params[name]) if name in params else EMPTY
        for name in dimensions
    ]
    for objective in objectives:
        test, validation = record.test.get(objective.name), record.validation.get(objective.name)
        key = "" if test is None else test.mean
        is_empty = test is None and validation is None
        cells.append(EMPTY if is_empty else (_build_value_cell(test, validation), key))
    verdict: Cell = ("satisfied", 1) if record.feasible else ("violated", 0)
    cells += [
        EMPTY if record.feasible is None else verdict,
        (format_duration(seconds), seconds) if seconds else EMPTY,
        (escape(record.reason), record.reason),
    ]
    body = "".join(
        f'<td data-sort="{escape(str(key), quote=True)}">{html}</td>' for html, key in cells
    )
    return f'<tr data-state="{record.state}"{" class=front" if on_front else ""}>{body}</tr>'
