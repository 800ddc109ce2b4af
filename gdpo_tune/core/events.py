"""Events that tuning sends to its listeners, tracking and display. A listener never blocks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gdpo_tune.core.incidents import Incident
from gdpo_tune.core.requests import RecordedRequest
from gdpo_tune.core.trials import Measurement, TrialRecord


@dataclass(frozen=True)
class SweepStarted:
    """Start of a sweep; `records` are those that the ledger already holds."""

    records: tuple[TrialRecord, ...]
    planned: int
    """Trials that will exist at the end, replicates and baselines included, as far as known."""
    moved_aside: Path | None = None
    """Where an earlier sweep of this name was moved, if there was one."""
    candidates: int = 0
    """Checkpoints and merges among the planned trials, which train nothing."""
    pause: RecordedRequest | None = None
    """The request that paused the sweep; None if it is not paused."""
    sweep_id: str = ""
    """Id of the ledger; empty if an older version began it."""


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
    earlier: Sequence[Measurement] = ()
    """Measurements before it that were held back, by step; none has validation metrics."""


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
    planned: int
    """As in `SweepStarted`, and so are the next two."""
    candidates: int
    pause: RecordedRequest | None


@dataclass(frozen=True)
class SweepFinished:
    """End of a sweep: no trial is left to run, or the user stopped it."""

    records: tuple[TrialRecord, ...]
    interrupted: bool
    reason: str = ""
    """Why no trial is left to run, for a person; empty if interrupted."""


Event = (
    SweepStarted
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
    """`catching up`: more messages wait than one batch holds, or than came since it was away."""
    pending: int
    """Messages that are not delivered yet."""
    problem: str
    """Why no message can be delivered; empty unless `away`."""

    def __str__(self) -> str:
        """Return a line for a person."""
        if self.kind == "up to date":
            return "MLflow: up to date"
        if self.kind == "catching up":
            return f"MLflow: catching up, {self.pending:,} updates left"
        return f"MLflow: {self.pending:,} updates are kept and will be sent: {self.problem}"
