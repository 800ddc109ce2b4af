"""Events of a sweep for tracking and display, with its incidents and the requests of people.

A listener never blocks the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gdpo_tune.core.text import format_parameter
from gdpo_tune.core.trials import Measurement, Params, Part, TrialRecord

WAS_LOST = "was lost"
"""End of the description of an incident in which a node was lost."""
IS_TRIED_AGAIN = "is tried again"
"""Start of the description of an incident in which an attempt at a trial failed."""


@dataclass(frozen=True)
class Incident:
    """A failure that a sweep survived: a node was lost, an attempt at a trial failed."""

    time: float
    """Unix seconds."""
    description: str
    """In one line; of a trial, a predicate: `is tried again: ...`."""
    trials: tuple[int, ...] = ()
    """Numbers of the trials that it concerns."""

    @property
    def kind(self) -> Literal["node lost", "attempt retried", "other"]:
        """Kind of the incident, by its description, which is all that ledgers store of it."""
        if self.description.endswith(WAS_LOST):
            return "node lost"
        return "attempt retried" if self.description.startswith(IS_TRIED_AGAIN) else "other"

    def __str__(self) -> str:
        if not self.trials:
            return self.description
        numbers = ", ".join(map(str, self.trials))
        if self.description.startswith("node "):
            return f"{self.description}, with trial{'s' if len(self.trials) > 1 else ''} {numbers}"
        return f"trial {numbers} {self.description}"


@dataclass(frozen=True)
class Request:
    """A change to a running sweep that a person asks for."""

    id: str
    """Random; nothing else tells apart two equal requests."""
    action: str
    """A key of `ACTIONS`, such as `stop`."""
    arguments: Mapping[str, Any]
    """JSON that the action takes, such as `{"trial": 7}`."""
    author: str
    """Name of the person who asked."""
    asked: float
    """Unix time in seconds."""

    @property
    def text(self) -> str:
        """Return the request as a person types it, such as `clone 7 learning_rate=0.0002`."""
        words = [self.action]
        for name, value in self.arguments.items():
            if isinstance(value, Mapping):
                words += [f"{name}={format_parameter(v)}" for name, v in value.items()]
            elif self.action == "budget":
                text = f"{value:g}" if isinstance(value, float) else format_parameter(value)
                words.append(f"{name}={text}")
            elif not isinstance(value, bool):
                words.append(str(value))
        return " ".join(words)


@dataclass(frozen=True)
class Setting:
    """A new value of a setting of `search:`, which holds while the file has the same value."""

    value: float
    file: float
    """Value in the sweep's file when the request was applied."""


@dataclass(frozen=True)
class RequestEffect:
    """Change that an applied request makes; all of them in order give the state of a sweep."""

    stop: int | None = None
    """Number of a trial that has to end."""
    point: Params | None = None
    """Parameters of a trial to start next; a missing one gets a quasi-random value."""
    parts: tuple[Part, ...] = ()
    """Trained policies of a merge to evaluate next."""
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    """`trials` or `budget.<name>` -> its new value."""
    paused: bool | None = None
    """True: no further trial starts; False: trials start again."""


@dataclass(frozen=True)
class RecordedRequest(Request):
    """A request in the ledger: the driver has applied or refused it."""

    applied: float
    """Unix time in seconds at which the driver took it."""
    outcome: Literal["applied", "refused"]
    reason: str
    """Result of the request, in one line for a person."""
    effect: RequestEffect = field(default_factory=RequestEffect)
    """Empty if it was refused."""

    def __str__(self) -> str:
        return f"{self.text}, asked by {self.author}: {self.outcome}: {self.reason}"


@dataclass(frozen=True)
class SweepStarted:
    """Start of a sweep; `records` are those that the ledger already holds."""

    records: tuple[TrialRecord, ...]
    moved_aside: Path | None = None
    """Where an earlier sweep of this name was moved, if there was one."""
    pause: RecordedRequest | None = None
    """The request that paused the sweep; None if it is not paused."""
    sweep_id: str = ""
    """Id of the ledger; empty if an older version began it."""


@dataclass(frozen=True)
class Outlook:
    """Trials and work to come, as far as the plan knows; sent after each change."""

    planned: int
    """Trials that exist at the end, at most: baselines, replicates, merges included."""
    work: float
    """Work to come, at most, in the unit of `Cost.work`."""
    hours: float | None = None
    """Hours that `search.budget.hours` leaves; None: it has no limit."""


@dataclass(frozen=True)
class SearchStarted:
    """Start of the search: the machines are known, and trials are about to start on them."""

    slots: int
    """Trials that run at the same time."""
    sampler: str
    """The sampler that proposes configurations, and why it was chosen."""


@dataclass(frozen=True)
class TrialStarted:
    """Start of a trial, or its continuation after an interruption or a pause."""

    record: TrialRecord


@dataclass(frozen=True)
class TrialProgress:
    """Report of a running trial."""

    number: int
    measurement: Measurement


@dataclass(frozen=True)
class TrialPaused:
    """Pause of a trial at a rung; a later promotion is a `TrialStarted`."""

    record: TrialRecord


@dataclass(frozen=True)
class TrialFinished:
    """End of a trial: complete, pruned or failed, as `record.state` says."""

    record: TrialRecord


@dataclass(frozen=True)
class IncidentOccurred:
    """Incident that the sweep survives."""

    incident: Incident


@dataclass(frozen=True)
class SweepSteered:
    """A request that was applied or refused, with the state of the sweep after it."""

    request: RecordedRequest
    pause: RecordedRequest | None
    """As in `SweepStarted`."""


@dataclass(frozen=True)
class SweepFinished:
    """End of a sweep: no trial is left to run, or the user stopped it."""

    records: tuple[TrialRecord, ...]
    interrupted: bool
    reason: str = ""
    """Why no trial is left to run, for a person; empty if interrupted."""


Event = (
    SweepStarted
    | Outlook
    | SearchStarted
    | TrialStarted
    | TrialProgress
    | TrialPaused
    | TrialFinished
    | IncidentOccurred
    | SweepSteered
    | SweepFinished
)
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class TrackingState:
    """Progress of sending updates to the tracking server."""

    kind: Literal["up to date", "catching up", "away"]
    """`catching up`: the server answers again, and does not have everything yet."""
    pending: int
    """Runs of the server that may differ from the sweep, and events that were not read yet."""
    problem: str
    """Why nothing can be sent; empty unless `away`."""

    def __str__(self) -> str:
        if self.kind == "up to date":
            return "MLflow: up to date"
        if self.kind == "catching up":
            return f"MLflow: catching up, {self.pending:,} updates left"
        return f"MLflow: {self.pending:,} updates are kept and will be sent: {self.problem}"
