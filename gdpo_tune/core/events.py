"""What tuning tells its listeners, tracking and display. A listener never blocks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gdpo_tune.core.trials import Incident, Measurement, TrialRecord


@dataclass(frozen=True)
class SweepStarted:
    """The driver is up; `records` are what the ledger already holds."""

    records: tuple[TrialRecord, ...]
    planned: int
    """Trials that will exist at the end, replicates and baselines included, as far as known."""
    moved_aside: Path | None = None
    """Where an earlier sweep of this name was moved to, if one was."""


@dataclass(frozen=True)
class SearchStarted:
    """The machines are known, and trials are about to start on them."""

    slots: int
    """Trials at the same time."""
    sampler: str
    """Who proposes configurations, and why."""


@dataclass(frozen=True)
class TrialStarted:
    """A trial began, or went on after an interruption or a pause."""

    record: TrialRecord


@dataclass(frozen=True)
class TrialProgress:
    """A running trial reported."""

    number: int
    measurement: Measurement
    earlier: Sequence[Measurement] = ()
    """Those before it that it held back, by step; nothing was measured on validation prompts."""


@dataclass(frozen=True)
class TrialPaused:
    """A trial waits at a rung; it may be promoted later, which is told as `TrialStarted`."""

    record: TrialRecord


@dataclass(frozen=True)
class TrialFinished:
    """A trial is complete, pruned or failed; `record.state` says which."""

    record: TrialRecord


@dataclass(frozen=True)
class Disturbed:
    """Something befell the sweep, and it goes on."""

    incident: Incident


@dataclass(frozen=True)
class SweepFinished:
    """No trial is left to run, or the user stopped the sweep."""

    records: tuple[TrialRecord, ...]
    interrupted: bool
    reason: str = ""
    """Why nothing is left to run, for a person; empty if interrupted."""


Event = (
    SweepStarted
    | SearchStarted
    | TrialStarted
    | TrialProgress
    | TrialPaused
    | TrialFinished
    | Disturbed
    | SweepFinished
)
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class TrackingState:
    """How far the other side is."""

    kind: Literal["up to date", "catching up", "away"]
    """`catching up`: more waits than one batch holds, or than was put since it was away."""
    pending: int
    """Messages that are not delivered yet."""
    problem: str
    """Why nothing can be delivered; empty unless `away`."""

    def __str__(self) -> str:
        """A line for a person."""
        if self.kind == "up to date":
            return "MLflow: up to date"
        if self.kind == "catching up":
            return f"MLflow: catching up, {self.pending:,} updates left"
        return f"MLflow: {self.pending:,} updates are kept and will be sent: {self.problem}"
