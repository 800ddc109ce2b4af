"""Completions of the front's policies, for reading."""

from __future__ import annotations

from html import escape

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.completions import Completion, read_completions
from gdpo_tune.core.formatting import NOTHING, abbreviate
from gdpo_tune.figures.hover import heading

MOST = 12
"""Policies that are shown: those that are singled out first, then the front's others."""


def samples(front: Front) -> str:
    """A fold a policy, as HTML; empty where nothing was kept."""
    directories = {record.number: record.directory for record in front.records}
    order = sorted(front.members, key=lambda member: not front.picked_as(member))
    folds: list[str] = []
    for member in order:
        directory = directories[member.numbers[0]]
        kept = read_completions(directory) if directory is not None else []
        if kept and len(folds) < MOST:
            folds.append(_fold(front, member, kept, is_open=not folds))
    return "".join(folds)


def _fold(front: Front, member: Configuration, kept: list[Completion], *, is_open: bool) -> str:
    names = ", ".join(front.picked_as(member))
    title = escape(heading(member)) + (f" ({escape(names)})" if names else "")
    body = "".join(_said(completion) for completion in kept)
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{body}</details>"


def _said(said: Completion) -> str:
    judged = ", ".join(
        f"{abbreviate(name)} {NOTHING if value is None else f'{value:g}'}"
        for name, value in said.metrics.items()
    )
    return (
        f"<pre><b>{escape(said.prompt)}</b>{escape(said.completion)}</pre>"
        f'<p class="note">{escape(judged)}</p>'
    )
