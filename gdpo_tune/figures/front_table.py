"""The front as an HTML table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import (
    NOTHING,
    abbreviate,
    format_estimate,
    format_number,
    format_parameter,
    mode_of,
)
from gdpo_tune.core.trials import Estimate
from gdpo_tune.figures import style
from gdpo_tune.figures.hover import heading


def front_table(front: Front, dimensions: Sequence[str]) -> str:
    """One row a member, best in the first objective first, then the baselines."""
    if not front.members and not front.baselines:
        return '<p class="empty">No trial is complete yet.</p>'
    heads = ["configuration", "normalization"]
    heads += [abbreviate(name) for name in dimensions if name != "normalization"]
    heads += [abbreviate(goal.name) for goal in front.objectives]
    heads += ["seeds", "P(front)"]
    rows = [_row(front, member, dimensions) for member in front.members]
    rows += [_row(front, c, dimensions) for c in front.baselines if not c.on_front]
    if not front.members:
        rows.insert(0, f'<tr><td colspan="{len(heads)}">Nothing is on the front yet.</td></tr>')
    return html_table("front", map(escape, heads), rows)


def html_table(kind: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """A table that scrolls: `heads` as HTML without `<th>`, `rows` as HTML with `<tr>`."""
    return (
        f'<div class="scroll tall"><table class="{kind}"><thead><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table></div>"
    )


def mode_cell(mode: str) -> str:
    """The name of a mode beside a patch of its colour."""
    color = style.mark_of(mode).color
    return f'<i class="patch" style="background:{color}"></i>{escape(mode)}'


def value_cell(test: Estimate | None, validation: Estimate | None) -> str:
    """A value on test prompts, and under it the one on validation prompts."""
    seen = NOTHING if validation is None else format_number(validation.mean)
    return f"{format_estimate(test)}<small>validation {seen}</small>"


def _row(front: Front, configuration: Configuration, dimensions: Sequence[str]) -> str:
    trained = configuration.role != "untrained"
    names = front.picked_as(configuration)
    if configuration.on_front and configuration.provisional:
        names.append("provisional")
    badges = "".join(f'<span class="badge {name}">{escape(name)}</span>' for name in names)
    cells = [f"{escape(heading(configuration))}<small>{badges}</small>"]
    cells.append(mode_cell(mode_of(configuration.params)) if trained else NOTHING)
    cells += [
        escape(format_parameter(configuration.params.get(name) if trained else None))
        for name in dimensions
        if name != "normalization"
    ]
    for goal in front.objectives:
        test, seen = configuration.mean[goal.name], configuration.validation.get(goal.name)
        cells.append(value_cell(test, seen))
    likely = f"{configuration.probability:.2f}" if configuration.rank >= 0 else NOTHING
    cells += [str(configuration.seeds) if trained else NOTHING, likely]
    kind = "" if configuration.on_front else ' class="off"'
    return f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
