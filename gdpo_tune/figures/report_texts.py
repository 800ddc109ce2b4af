"""Parts of the report that are text: its head, facts, failures and incidents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any

from gdpo_tune.analysis.agreement import measure_agreements
from gdpo_tune.analysis.front import Front
from gdpo_tune.core.settings import STRICT
from gdpo_tune.core.text import format_duration, format_hypervolume
from gdpo_tune.core.trials import TrialRecord, title_candidate
from gdpo_tune.results.summary import (
    ChosenTrial,
    describe_content,
    describe_left_out_prompts,
    describe_states,
    describe_work,
    list_incidents,
    measure_wall_time,
)

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def build_head(
    spec: SweepSpec, front: Front, ending: str = "", chosen: ChosenTrial | None = None
) -> str:
    """Return the head of the report: the sweep, and its main numbers in one line.

    `ending` says why nothing was left to run, if so.
    """
    complete, others = describe_states(front.records)
    bounds = ", ".join(f"{name} {bound}" for name, bound in spec.constraints.items())
    facts = {
        "task": spec.task,
        "policy": spec.policy,
        "scoring": "" if spec.scoring == STRICT else spec.scoring,
        "constraints": bounds,
        "trials": f"{complete} complete" + (f", {others}" if others else ""),
        "wall-clock time": format_duration(measure_wall_time(front.records)),
        "ended": ending,
        "chosen": "; ".join(chosen.lines) if chosen else "",
    }
    return f"<header><h1>{escape(spec.name)}</h1>{_build_facts(facts)}</header>"


def describe_sweep(spec: SweepSpec, front: Front) -> str:
    """Return the facts about a sweep that a reader of the front can do without."""
    work = describe_work(front.records, spec.resources.trials_per_process, "trials")
    completions = sum(record.cost.completions for record in front.records)
    agreement = "; ".join(map(str, measure_agreements(front.records, front.objectives)))
    provisional = sum(member.is_provisional for member in front.members)
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    facts = {
        "directory": spec.address or str(spec.directory.absolute()),
        "identity": spec.compute_identity(),
        "on the front": f"{len(front.members)}, {provisional} provisional",
        "hypervolume": format_hypervolume(front.hypervolume, front.hypervolume_interval, points),
        "cost": f"{work}, {completions:,} completions",
        "do early scores predict final ones?": agreement,
        "changes": describe_content(front.records),
        "prompts too long, left out": describe_left_out_prompts(front.records),
    }
    return _build_facts(facts)


def _build_facts(facts: Mapping[str, str]) -> str:
    items = (f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    return f"<dl>{''.join(items)}</dl>"


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
