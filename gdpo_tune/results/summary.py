"""How a sweep went, in a few words and numbers: what the report and the terminal both show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.trials import LEFT_OUT, Incident, TrialRecord

REPORT = "report.html"
FRONT = "front.png"
"""Names of the files in a sweep's folder."""


@dataclass(frozen=True)
class Choice:
    """What a person chose among the trials."""

    number: int
    """Of the trial."""
    lines: tuple[str, ...]
    """What is to be told of it."""


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


def incidents_of(sessions: Sequence[Mapping[str, Any]]) -> list[Incident]:
    """Everything in order, over all sessions as `Ledger.sessions` has them."""
    return [incident for session in sessions for incident in session.get("incidents", ())]
