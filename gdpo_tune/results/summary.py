"""Facts and phrases about a sweep that the report and the terminal share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdpo_tune.analysis.front import Front
from gdpo_tune.analysis.origins import summarize_origins
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.events import Incident
from gdpo_tune.core.text import format_count, format_duration, format_percent
from gdpo_tune.core.trials import (
    MERGE_PREFIX,
    PROMPTS_LEFT_OUT,
    Estimate,
    TrialRecord,
    format_parts,
    title_candidate,
)
from gdpo_tune.results.front_table import BASELINES, title_policy

REPORT_FILE = "report.html"
FRONT_FILE = "front.png"
"""Names of the files in a sweep's directory."""
ORIGINS = {"ends": "final policies", "checkpoints": "earlier checkpoints", "merges": "merges"}
"""Kind of candidates -> its name where a person reads."""
OPEN_STATES = {"running": "unfinished", "paused": "paused at a rung"}
"""State of a trial that has not ended -> its description in a summary."""


@dataclass(frozen=True)
class ChosenTrial:
    """Candidate that a choice names."""

    record: TrialRecord
    """Trial with that name, or the first trial of the configuration that was picked."""
    label: str
    """Part of a directory's name: `knee`, `trial-7`, `trial-7-step-40` or `merge-27`."""
    lines: tuple[str, ...]
    """Sentences about it: its values, and how certain its conditions are."""
    values: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """Means over seeds on test prompts; empty if it was not measured to its end."""

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return self.record.name


def measure_wall_time(records: Sequence[TrialRecord]) -> float:
    """Return seconds from the first start of a trial to the last end; 0 before anything ended."""
    started = [record.started for record in records if record.started is not None]
    finished = [record.finished for record in records if record.finished is not None]
    return max(finished) - min(started) if started and finished else 0.0


def name_state(state: str) -> str:
    """Return the state of a trial as a person reads it."""
    return "stopped early" if state == "pruned" else state


def describe_work(records: Sequence[TrialRecord], together: int, unit: str) -> str:
    """Return the time of all trials as `unit`; say so where `together` ones share a process.

    That time then holds the turns of the others, so the sum is longer than the work.
    """
    work = f"{format_duration(sum(record.cost.seconds for record in records))} of {unit}"
    waits = f" (up to {together} trials share a process, and wait for each other)"
    return work + (waits if together > 1 else "")


def describe_states(records: Sequence[TrialRecord]) -> tuple[int, str]:
    """Count the complete trials that are no merges or checkpoints, and describe all others.

    The description is such as `2 unfinished, 1 failed, 20 of 34 merges and checkpoints complete`;
    it may be empty.
    """
    states = Counter(record.state for record in records if not record.parts)
    others = [
        f"{states[state]} {OPEN_STATES.get(state) or name_state(state)}"
        for state in ("running", "paused", "pruned", "failed")
        if states[state]
    ]
    if candidates := [record.state for record in records if record.parts]:
        done = candidates.count("complete")
        others.append(f"{done} of {len(candidates)} merges and checkpoints complete")
    return states["complete"], ", ".join(others)


def describe_left_out_prompts(records: Sequence[TrialRecord]) -> str:
    """Return each split that lacks prompts, such as `train 12 of 2048`; may be empty."""
    counts = {
        key.removeprefix(PROMPTS_LEFT_OUT): count
        for record in records
        for key, count in record.environment.items()
        if key.startswith(PROMPTS_LEFT_OUT)
    }
    return ", ".join(f"{split} {count}" for split, count in counts.items())


def describe_content(records: Sequence[TrialRecord]) -> str:
    """Return how many trials ran before and after accepted changes of content; may be empty."""
    counts = Counter((r.content, r.is_comparable) for r in records if r.content)
    return "; ".join(
        f"{format_count(count, 'trial')} {content}{'' if is_comparable else ', on no front'}"
        for (content, is_comparable), count in counts.items()
    )


def describe_origins(front: Front) -> list[str]:
    """Describe each kind of candidates: its share of the hypervolume, and its cost.

    Shares are nested: what final policies reach alone, what checkpoints add, what merges add.
    Empty for a sweep with final policies alone.
    """
    lines: list[str] = []
    for origin in summarize_origins(front):
        cost = origin.cost
        word = "give" if origin.kind == "ends" else "add"
        lines.append(
            f"{ORIGINS[origin.kind]} {word} {format_percent(origin.share)} of the hypervolume "
            f"({origin.members} on the front): {format_count(origin.trials, 'trial')}, "
            f"{cost.completions:,} completions in training, {cost.evaluation_completions:,} in "
            f"evaluations, {format_duration(cost.cpu_seconds)} of CPU time"
        )
    return lines


def name_configuration(configuration: Configuration) -> str:
    """Return its candidate and its replicates: `trial 7, replicates 20, 23`, `untrained policy`.

    A merge shows its parts: `merge-27 (0.5 x 7@60 + 0.5 x 12@60)`.
    """
    name = title_policy(configuration)
    if configuration.role == "merge":
        name += f" ({format_parts(configuration.parts)})"
    others = [str(number) for number in configuration.numbers if number != configuration.first]
    if others:
        name += f", replicate{'s' if len(others) > 1 else ''} {', '.join(others)}"
    return name + (" (published weights)" if configuration.role == "published" else "")


def describe_role(record: TrialRecord) -> str:
    """Return why a trial was run: its role, such as `search`, `replicate of 3`, `checkpoint 7@40`.

    A merge shows its parts: `merge of 0.5 x 7@60 + 0.5 x 12@60`.
    """
    if record.role == "replicate":
        kinds = ("", "the checkpoint of trial ", MERGE_PREFIX)
        return f"replicate of {kinds[min(2, len(record.parts))]}{record.replicate_of}"
    if record.role == "checkpoint":
        return title_candidate(record.name)
    if record.role == "merge":
        return f"merge of {format_parts(record.parts)}"
    return BASELINES.get(record.role, record.role)


def describe_last_session(sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return how the newest session stands, as far as the ledger knows; empty without sessions."""
    if not sessions:
        return ""
    if ending := sessions[-1].get("ending"):
        return f"finished ({ending})"
    return "interrupted" if "finished" in sessions[-1] else "running, or killed"


def list_incidents(sessions: Sequence[Mapping[str, Any]]) -> list[Incident]:
    """Return the incidents of all sessions in order; sessions as `Ledger.get_sessions`."""
    return [incident for session in sessions for incident in session.get("incidents", ())]
