"""A sweep as a small piece of HTML, for the output of a cell in a notebook."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from gdpo_tune.analysis.front import Front
from gdpo_tune.core.text import abbreviate_parameter, format_count
from gdpo_tune.results.front_figures import build_figures, describe_front
from gdpo_tune.results.front_table import FrontRow, list_rows
from gdpo_tune.results.summary import REPORT_FILE, describe_states
from gdpo_tune.spec import SweepSpec

MOST_ROWS = 8
"""Members of the front that the table shows, unless more stand out."""


def render_sweep(spec: SweepSpec, front: Front, state: str) -> str:
    """Return name, state, counts, front with baselines, and a link to the report."""
    complete, others = describe_states(front.records)
    counts = ", ".join(filter(None, [f"{format_count(complete, 'trial')} complete", others]))
    rows = list_rows(front, MOST_ROWS)
    table = pd.DataFrame([_build_cells(front, row) for row in rows])
    hidden = len(front.members) - sum(row.policy.is_on_front for row in rows)
    more = f"<p>{format_count(hidden, 'more configuration')} on the front: see "
    parts = [
        f"<p><b>{escape(spec.name)}</b>{escape(f': {state}' if state else '')}<br>",
        f"{escape(counts)}<br>{escape(describe_front(build_figures(front)))}</p>",
        table.to_html(index=False, border=0) if len(table) else "",
        f"{more}<code>.front</code></p>" if hidden else "",
        f"<p>{_link_report(spec.directory / REPORT_FILE, spec.location)}</p>",
    ]
    return "".join(parts)


def _build_cells(front: Front, row: FrontRow) -> dict[str, str]:
    names = [abbreviate_parameter(goal.name) for goal in front.objectives]
    cells = [text.replace(" ", "\N{NO-BREAK SPACE}") for text in row.cells]
    published = [row.baseline] if row.policy.role == "published" else []
    return {
        "configuration": row.title,
        **dict(zip(names, cells, strict=True)),
        "seeds": str(row.policy.seeds),
        "on the front": "yes" if row.policy.is_on_front else "no",
        "remarks": ", ".join([*published, *row.labels, *row.shortfalls]),
    }


def _link_report(report: Path, location: str) -> str:
    if report.exists():
        return f'<a href="{quote(os.path.relpath(report))}" target="_blank">{REPORT_FILE}</a>'
    return f"No report yet: <code>python -m gdpo_tune.report {escape(location)}</code>"
