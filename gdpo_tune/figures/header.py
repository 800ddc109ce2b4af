"""The head of the report: which sweep this is and how it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from gdpo_tune.analysis.agreement import agreements
from gdpo_tune.analysis.front import Front
from gdpo_tune.core.formatting import format_duration, format_interval, format_number
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.results.summary import Choice, left_out, other_states, wall_time

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def header(spec: SweepSpec, front: Front, ending: str = "", chosen: Choice | None = None) -> str:
    """Name, identity and the main figures of a sweep; `ending`: why nothing was left to run."""
    states = Counter(record.state for record in front.records)
    provisional = sum(member.provisional for member in front.members)
    tiles = [
        ("trials complete", str(states["complete"]), other_states(states) or "none failed"),
        ("on the front", str(len(front.members)), f"{provisional} provisional"),
        ("hypervolume", format_number(front.hypervolume), _hypervolume_note(front)),
        (
            "from first start to last end",
            format_duration(wall_time(front.records)),
            _work(front.records),
        ),
    ]
    asked = [
        ("task", spec.task),
        ("policy", spec.policy),
        ("identity", spec.identity()),
        ("folder", spec.address or str(spec.directory.absolute())),
    ]
    if spec.constraints:
        bounds = ", ".join(f"{name} {bound}" for name, bound in spec.constraints.items())
        asked.insert(2, ("constraints", bounds))
    if ending:
        asked.append(("ended", ending))
    if chosen:
        asked.append(("chosen", "; ".join(chosen.lines)))
    told = agreements(front.records, front.objectives)
    if told:
        asked.append(("rungs against the end", "; ".join(map(str, told))))
    too_long = left_out(front.records)
    if too_long:
        asked.append(("prompts too long, left out", too_long))
    return (
        f"<header><h1>{escape(spec.name)}</h1><dl>"
        + "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in asked)
        + '</dl><div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{name}</span><b>{value}</b>'
            f"<small>{escape(note)}</small></div>"
            for name, value, note in tiles
        )
        + "</div></header>"
    )


def _hypervolume_note(front: Front) -> str:
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    reference = f"reference: {points}"
    if not front.members:
        return reference
    interval = front.hypervolume_interval
    return f"95 %: {format_interval(interval.low, interval.high)}; {reference}"


def _work(records: Sequence[TrialRecord]) -> str:
    seconds = sum(record.cost.seconds for record in records)
    completions = sum(record.cost.completions for record in records)
    return f"{format_duration(seconds)} of trials, {completions:,} completions"
