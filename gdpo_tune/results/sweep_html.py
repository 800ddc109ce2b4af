"""A sweep as a small piece of HTML, for the output of a cell in a notebook."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import abbreviate_parameter, format_count, format_estimate
from gdpo_tune.results.front_figures import build_figures, describe_front
from gdpo_tune.results.summary import REPORT_FILE, describe_states, title_configuration
from gdpo_tune.spec import SweepSpec

MOST_ROWS = 8
"""Members of the front that the table shows, unless more stand out."""


def render_sweep(spec: SweepSpec, front: Front, state: str) -> str:
    """Return name, state, counts, front with baselines, and a link to the report."""
    complete, others = describe_states(front.records)
    counts = ", ".join(filter(None, [f"{format_count(complete, 'trial')} complete", others]))
    table = build_front_table(front)
    hidden = len(front.members) - sum(table["on the front"] == "yes") if len(table) else 0
    more = f"<p>{format_count(hidden, 'more configuration')} on the front: see "
    parts = [
        f"<p><b>{escape(spec.name)}</b>{escape(f': {state}' if state else '')}<br>",
        f"{escape(counts)}<br>{escape(describe_front(build_figures(front)))}</p>",
        table.to_html(index=False, border=0) if len(table) else "",
        f"{more}<code>.front</code></p>" if hidden else "",
        f"<p>{_link_report(spec.directory / REPORT_FILE, spec.location)}</p>",
    ]
    return "".join(parts)


def build_front_table(front: Front) -> pd.DataFrame:
    """Return some members and the baselines, with means on test prompts."""
    shown = [*_choose_members(front), *(c for c in front.baselines if not c.is_on_front)]
    return pd.DataFrame([_build_row(front, configuration) for configuration in shown])


def _choose_members(front: Front) -> list[Configuration]:
    """Return baselines and members that stand out, and others spread over the front.

    There are at most `MOST_ROWS`, unless more stand out. They are in the front's order.
    """
    chosen = [m for m in front.members if front.list_labels(m) or m in front.baselines]
    others = [member for member in front.members if member not in chosen]
    free = min(len(others), max(0, MOST_ROWS - len(chosen)))
    chosen += [others[index * len(others) // free] for index in range(free)]
    return [member for member in front.members if member in chosen]


def _build_row(front: Front, configuration: Configuration) -> dict[str, str]:
    remarks = [*front.list_labels(configuration), *front.list_shortfalls(configuration)]
    if configuration.role == "published":
        remarks.insert(0, "published weights")
    means = {
        abbreviate_parameter(goal.name): format_estimate(configuration.mean[goal.name])
        for goal in front.objectives
    }
    return {
        "configuration": title_configuration(configuration),
        **{name: text.replace(" ", "\N{NO-BREAK SPACE}") for name, text in means.items()},
        "seeds": str(configuration.seeds),
        "on the front": "yes" if configuration.is_on_front else "no",
        "remarks": ", ".join(remarks),
    }


def _link_report(report: Path, location: str) -> str:
    if report.exists():
        return f'<a href="{quote(os.path.relpath(report))}" target="_blank">{REPORT_FILE}</a>'
    return f"No report yet: <code>python -m gdpo_tune.report {escape(location)}</code>"
