"""Parts of the report that are text: its head, sample completions, failures and incidents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.agreement import measure_agreements
from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.candidates import title_candidate
from gdpo_tune.core.completions import Completion, read_completions
from gdpo_tune.core.formatting import (
    NO_VALUE,
    abbreviate_parameter,
    format_duration,
    format_first,
    format_interval,
    format_number,
)
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.results.summary import (
    ChosenTrial,
    describe_left_out_prompts,
    describe_states,
    list_incidents,
    measure_wall_time,
    name_configuration,
)

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

MAX_POLICIES = 40
"""Policies with sample completions: baselines, the knee and the extremes first."""
MOST_NAMED = 12
"""Policies that are named where completions are missing."""


def build_head(
    spec: SweepSpec, front: Front, ending: str = "", chosen: ChosenTrial | None = None
) -> str:
    """Return the head of the report: the sweep's settings, and its main numbers in tiles.

    `ending` says why nothing was left to run, if so.
    """
    complete, others = describe_states(front.records)
    provisional = sum(member.is_provisional for member in front.members)
    duration = format_duration(measure_wall_time(front.records))
    work = format_duration(sum(record.cost.seconds for record in front.records))
    completions = sum(record.cost.completions for record in front.records)
    tiles = [
        ("Trials complete", str(complete), others or "none failed"),
        ("On the front", str(len(front.members)), f"{provisional} provisional"),
        ("Hypervolume", format_number(front.hypervolume), _describe_hypervolume(front)),
        ("Wall-clock time", duration, f"{work} of trials, {completions:,} completions"),
    ]
    bounds = ", ".join(f"{name} {bound}" for name, bound in spec.constraints.items())
    agreement = "; ".join(map(str, measure_agreements(front.records, front.objectives)))
    facts = {
        "task": spec.task,
        "policy": spec.policy,
        "constraints": bounds,
        "identity": spec.compute_identity(),
        "directory": spec.address or str(spec.directory.absolute()),
        "ended": ending,
        "chosen": "; ".join(chosen.lines) if chosen else "",
        "Do early scores predict final ones?": agreement,
        "prompts too long, left out": describe_left_out_prompts(front.records),
    }
    items = (f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    boxes = (
        f'<div class="tile"><span>{name}</span><b>{value}</b><small>{escape(note)}</small></div>'
        for name, value, note in tiles
    )
    return (
        f"<header><h1>{escape(spec.name)}</h1><dl>{''.join(items)}</dl>"
        f'<div class="tiles">{"".join(boxes)}</div></header>'
    )


def build_samples(front: Front) -> str:
    """Return one fold per policy with its completions; empty if none were kept.

    Every trial keeps completions of the same prompts. A last line says whose are not shown.
    """
    directories = {record.number: record.directory for record in front.records}
    members = sorted(front.members, key=lambda member: not front.list_labels(member))
    shown = [*(b for b in front.baselines if not b.is_on_front), *members]
    folds: list[str] = []
    missing: list[str] = []
    for policy in shown:
        directory = directories[policy.numbers[0]]
        completions = read_completions(directory) if directory is not None else []
        if not completions or len(folds) == MAX_POLICIES:
            missing.append(title_candidate(policy.name))
            continue
        is_open = policy is front.knee
        folds.append(_build_fold(front, policy, completions, is_open=is_open))
    if folds and missing:
        names = escape(format_first(missing, MOST_NAMED))
        folds.append(f'<p class="note">Not shown, or without kept completions: {names}.</p>')
    return "".join(folds)


def list_failures(records: Sequence[TrialRecord]) -> str:
    """Return every failed trial with its reason; empty if none failed."""
    return _build_list(
        (title_candidate(record.name), record.reason or "no reason recorded")
        for record in records
        if record.state == "failed"
    )


def list_node_losses(sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return every node loss and retried attempt with its time; empty if nothing happened."""
    return _build_list(
        (f"{datetime.fromtimestamp(incident.time).astimezone():%Y-%m-%d %H:%M:%S}", str(incident))
        for incident in list_incidents(sessions)
    )


def _build_list(items: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<li><b>{head}</b> {escape(text)}</li>" for head, text in items)
    return f'<ul class="failures">{lines}</ul>' if lines else ""


def _describe_hypervolume(front: Front) -> str:
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    interval = front.hypervolume_interval
    span = f"95 %: {format_interval(interval.low, interval.high)}; " if front.members else ""
    return f"{span}reference: {points}"


def _build_fold(
    front: Front, member: Configuration, completions: Sequence[Completion], *, is_open: bool
) -> str:
    names = ", ".join(front.list_labels(member))
    title = escape(name_configuration(member)) + (f" ({escape(names)})" if names else "")
    body = "".join(_build_sample(completion) for completion in completions)
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{body}</details>"


def _build_sample(sample: Completion) -> str:
    scores = ", ".join(
        f"{abbreviate_parameter(name)} {NO_VALUE if value is None else f'{value:g}'}"
        for name, value in sample.metrics.items()
    )
    return (
        f"<pre><b>{escape(sample.prompt)}</b>{escape(sample.completion)}</pre>"
        f'<p class="note">{escape(scores)}</p>'
    )
