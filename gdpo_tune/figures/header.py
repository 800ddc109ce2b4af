"""The head of the report: which sweep this is and how it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from gdpo_tune.analysis.agreement import agreements
from gdpo_tune.analysis.front import Front
from gdpo_tune.core.trials import LEFT_OUT, TrialRecord
from gdpo_tune.figures import Choice, style

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec


def header(spec: SweepSpec, front: Front, ending: str = "", chosen: Choice | None = None) -> str:
    """Name, identity and the main figures of a sweep; `ending`: why nothing was left to run."""
    states = Counter(record.state for record in front.records)
    provisional = sum(member.provisional for member in front.members)
    tiles = [
        ("trials complete", str(states["complete"]), other_states(states) or "none failed"),
        ("on the front", str(len(front.members)), f"{provisional} provisional"),
        ("hypervolume", style.number(front.hypervolume), _hypervolume_note(front)),
        (
            "from first start to last end",
            style.duration(wall_time(front.records)),
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


def wall_time(records: Sequence[TrialRecord]) -> float:
    """Seconds from the first start of a trial to the last end; 0 before anything ended."""
    started = [record.started for record in records if record.started is not None]
    finished = [record.finished for record in records if record.finished is not None]
    return max(finished) - min(started) if started and finished else 0.0


def other_states(states: Counter[str]) -> str:
    """The trials that are not complete, such as `2 unfinished, 1 failed`; or nothing."""
    words = {
        "running": "unfinished",
        "paused": "paused at a rung",
        "pruned": "stopped early",
        "failed": "failed",
    }
    named = [f"{states[state]} {word}" for state, word in words.items() if states[state]]
    return ", ".join(named)


def left_out(records: Sequence[TrialRecord]) -> str:
    """Each split that lacks prompts, such as `train 12 of 2048`; or nothing."""
    found = {
        key.removeprefix(LEFT_OUT): count
        for record in records
        for key, count in record.environment.items()
        if key.startswith(LEFT_OUT)
    }
    return ", ".join(f"{split} {count}" for split, count in found.items())


def _hypervolume_note(front: Front) -> str:
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    reference = f"reference: {points}"
    if not front.members:
        return reference
    return f"95 %: {style.interval(front.hypervolume_interval)}; {reference}"


def _work(records: Sequence[TrialRecord]) -> str:
    seconds = sum(record.cost.seconds for record in records)
    completions = sum(record.cost.completions for record in records)
    return f"{style.duration(seconds)} of trials, {completions:,} completions"
