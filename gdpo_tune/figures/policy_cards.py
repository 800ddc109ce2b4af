"""Card of a policy: its values against the untrained policy, its parameters, and commands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from shlex import quote
from typing import TYPE_CHECKING

from gdpo_tune.analysis.front import Front, find_untrained
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.selection import subtract_estimates
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.metrics import MetricInfo
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import (
    NO_VALUE,
    abbreviate_parameter,
    format_interval,
    format_number,
    format_parameter,
)
from gdpo_tune.core.trials import Estimate, format_parts
from gdpo_tune.figures.html_page import build_command, name_section
from gdpo_tune.figures.html_tables import build_badges, build_table
from gdpo_tune.results.summary import title_configuration

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def list_carded(front: Front) -> list[Configuration]:
    """Return the configurations with a card: members, baselines, and the chosen one."""
    chosen = [front.chosen] if front.chosen else []
    return list({c.name: c for c in (*front.members, *front.baselines, *chosen)}.values())


def build_cards(spec: SweepSpec, front: Front, links: Sequence[str] = ()) -> str:
    """Return one card per policy; the page shows the selected one.

    `links` are titles of sections that tell more about it.
    """
    ranges = _load_ranges(spec)
    items = " ".join(f'<a href="#{name_section(title)}">{title}</a>' for title in links)
    more = f'<p class="links">{items}</p>' if items else ""
    cards = [_build_card(spec, front, policy, ranges, more) for policy in list_carded(front)]
    return f'<div id="cards">{"".join(cards)}</div>' if cards else ""


def _load_ranges(spec: SweepSpec) -> Mapping[str, MetricInfo]:
    """Return the metrics of the task; empty if its file is gone, so that intervals stay whole."""
    try:
        return load_task_info(spec.task, spec.space.domains).metrics
    except TaskFileError:
        return {}


def _build_card(
    spec: SweepSpec,
    front: Front,
    policy: Configuration,
    ranges: Mapping[str, MetricInfo],
    more: str,
) -> str:
    shown = "" if policy is (front.chosen or front.knee) else " hidden"
    return (
        f'<article class="card" data-candidate="{escape(policy.name, quote=True)}"{shown}>'
        f"<h3>{escape(title_configuration(policy))} {build_badges(front, policy, ties=True)}</h3>"
        f'<div class="card-columns"><div>{_build_values(front, policy, ranges)}</div>'
        f"<div>{_build_facts(spec, front, policy)}{more}</div></div>"
        f"{_build_commands(spec, policy)}</article>"
    )


def _build_values(front: Front, policy: Configuration, ranges: Mapping[str, MetricInfo]) -> str:
    """Return each metric with its 95 % interval, and the difference to the untrained policy."""
    untrained = find_untrained(front.baselines)
    goals = [goal.name for goal in front.objectives]
    others = sorted(policy.mean.keys() - set(goals))
    rows: list[str] = []
    for name in (*goals, *others):
        own, info = policy.mean[name], ranges.get(name)
        base = untrained.mean.get(name) if untrained and untrained is not policy else None
        low, high = (info.low, info.high) if info else (-math.inf, math.inf)
        cells = [_format_interval(own, low, high), NO_VALUE, NO_VALUE]
        if base is not None:
            gain = _format_interval(subtract_estimates(own, base), sign="+")
            cells[1:] = [format_number(base.mean), gain]
        head = f'<th scope="row">{escape(abbreviate_parameter(name))}</th>'
        rows.append(f"<tr>{head}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    heads = ["metric", "value (95 %)", "untrained", "difference (95 %)"]
    return build_table("values", heads, rows, f"Values of {policy.name}")


def _format_interval(
    estimate: Estimate, low: float = -math.inf, high: float = math.inf, sign: str = ""
) -> str:
    """Return the mean and its interval, which ends where the metric does."""
    ends = max(low, estimate.low), min(high, estimate.high)
    mean = f"{sign * (estimate.mean > 0)}{format_number(estimate.mean, ends[1] - ends[0])}"
    return f"<b>{mean}</b> <small>{format_interval(*ends)}</small>"


def _build_facts(spec: SweepSpec, front: Front, policy: Configuration) -> str:
    """Return the trials, the searched parameters or the parts, and the checkpoint."""
    facts: dict[str, str] = {}  # as HTML
    if policy.role != "untrained":
        facts = {
            escape(abbreviate_parameter(name)): escape(format_parameter(policy.params[name]))
            for name in spec.space.dimensions
            if name in policy.params
        }
        links = (f'<a href="#trial-{number}">{number}</a>' for number in policy.numbers)
        facts["trials" if policy.seeds > 1 else "trial"] = ", ".join(links)
    if policy.role == "merge":
        facts = {"merge of": format_parts(policy.parts), **facts}
    if policy.rank >= 0:
        facts["P(front)"] = f"{policy.probability:.2f}"
    checkpoint = next((r.checkpoint for r in front.records if r.number == policy.first), None)
    if checkpoint is not None:
        facts["checkpoint"] = escape(str(checkpoint))
    items = "".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts.items())
    return f'<dl class="facts">{items}</dl>' if items else ""


def _build_commands(spec: SweepSpec, policy: Configuration) -> str:
    """Return the commands that train, export or merge a policy again.

    Each has `{pick}` where the page writes the choice: a rule, or the name of the candidate.
    """
    if policy.role == "untrained":
        return ""
    location = quote(str(spec.address or spec.directory.absolute()))
    is_merge = policy.role == "merge"
    library = "mergekit" if is_merge else "trl"
    export = f"python -m gdpo_tune.export {location} --to {library} --pick {{pick}}"
    if is_merge:
        weights = ",".join(f"{p.trial}@{p.step}={p.weight!r}" for p in policy.parts)
        heaviest = max(policy.parts, key=lambda part: part.weight)
        parent = f"{location} --pick {heaviest.trial}@{heaviest.step}"
        commands = {
            "Merge again": f"python -m gdpo_tune.merge {location} --weights {weights}",
            "Train its main parent": f"python -m gdpo_tune.train --from {parent}",
        }
    else:
        commands = {"Train again": f"python -m gdpo_tune.train --from {location} --pick {{pick}}"}
    commands |= {"Export": export}
    return "".join(
        build_command(title, command, policy.name) for title, command in commands.items()
    )
