"""Sample completions in a grid: a row per prompt, a column per policy, the untrained one first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from gdpo_tune.analysis.front import Front, find_untrained
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.text import NO_VALUE, abbreviate_parameter, format_first
from gdpo_tune.core.trial_files import Completion, read_completions
from gdpo_tune.figures.html_tables import build_table
from gdpo_tune.results.summary import title_configuration

MAX_POLICIES = 40
"""Policies with sample completions: baselines, the knee and the extremes first."""
MOST_NAMED = 12
"""Policies that are named where completions are missing."""

Samples = Mapping[str, Completion]
"""Prompt -> completion."""


def build_completions(front: Front) -> str:
    """Return the grid; empty if no completions were kept.

    Every trial keeps completions of the same prompts. A last line says whose are not shown.
    """
    columns: list[tuple[Configuration, Samples]] = []
    missing: list[str] = []
    directories = {record.number: record.directory for record in front.records}
    first = (find_untrained(front.baselines), front.chosen, front.knee)
    shown = (*first, *front.extremes.values(), *front.baselines, *front.members)
    for policy in {policy.name: policy for policy in shown if policy is not None}.values():
        directory = directories[policy.numbers[0]]
        samples = {s.prompt: s for s in read_completions(directory)} if directory else {}
        if samples and len(columns) < MAX_POLICIES:
            columns.append((policy, samples))
        else:
            missing.append(title_configuration(policy))
    if not columns:
        return ""
    prompts = list(dict.fromkeys(prompt for _, samples in columns for prompt in samples))
    heads = ["prompt", *(_build_head(front, policy) for policy, _ in columns)]
    rows = [_build_row(prompt, [samples for _, samples in columns]) for prompt in prompts]
    button = (
        '<button type="button" id="show-all-completions" aria-expanded="true" '
        f'data-count="{len(columns)}" hidden></button>'
    )
    table = build_table("completions", heads, rows, "Sample completions")
    names = escape(format_first(missing, MOST_NAMED))
    note = f'<p class="note">Not shown, or without kept completions: {names}.</p>'
    return button + table + (note if missing else "")


def _build_head(front: Front, policy: Configuration) -> str:
    """Return the head of a column; it tells the page whether to show the column at once."""
    is_listed = policy in front.baselines or bool(front.list_labels(policy))
    name, title = escape(policy.name, quote=True), escape(title_configuration(policy))
    return f'<span data-column="{name}"{" data-listed" if is_listed else ""}>{title}</span>'


def _build_row(prompt: str, columns: Sequence[Samples]) -> str:
    cells = "".join(f"<td>{_build_cell(samples.get(prompt))}</td>" for samples in columns)
    return f'<tr><th scope="row"><pre>{escape(prompt.strip())}</pre></th>{cells}</tr>'


def _build_cell(sample: Completion | None) -> str:
    if sample is None:
        return NO_VALUE
    scores = ", ".join(
        f"{abbreviate_parameter(name)} {NO_VALUE if value is None else f'{value:g}'}"
        for name, value in sample.metrics.items()
    )
    return f"<pre>{escape(sample.completion)}</pre><small>{escape(scores)}</small>"
