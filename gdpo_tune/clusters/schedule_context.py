"""One schedule at work: its file, its state, its backend, and a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gdpo_tune.clusters.backends.base import Backend, build_backend
from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.outcome import read_figures
from gdpo_tune.clusters.schedule_state import ScheduleEvent, ScheduleHistory, ScheduleState
from gdpo_tune.clusters.schedule_storage import ScheduleStorage
from gdpo_tune.core.errors import GdpoTuneError

Clock = Callable[[], datetime]
"""The time in UTC."""


@dataclass
class ScheduleContext:
    """What every step of a schedule works on."""

    sweep: ScheduledSweep
    history: ScheduleHistory
    clock: Clock
    build_backend: Callable[[ScheduledSweep], Backend] = build_backend
    read_figures: Callable[[ScheduledSweep, str, str | None], dict[str, Any]] = read_figures
    events: list[ScheduleEvent] = field(default_factory=list[ScheduleEvent])
    """Changes that were made here."""
    trouble: list[GdpoTuneError] = field(default_factory=list[GdpoTuneError])
    """Why something could not be done now: a backend did not answer."""

    @property
    def state(self) -> ScheduleState:
        """The state as it was last read or written."""
        return self.history.state

    @property
    def backend(self) -> Backend:
        """The backend that the file names."""
        return self.build_backend(self.sweep)

    def record(self, event: ScheduleEvent) -> bool:
        """Write the changed state; if another process was first, take its state, return False."""
        saved = self.history.save()
        self.events += [event] if saved else []
        return saved

    def run_name(self, due: datetime) -> str:
        """Return the name of the run for a time."""
        return f"{self.sweep.name}-{due.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def open_context(
    sweep: ScheduledSweep, clock: Clock, *, read_only: bool = False
) -> ScheduleContext:
    """Read the state of a schedule; refuse a new one where no state could be written."""
    storage = ScheduleStorage(sweep.storage)
    context = ScheduleContext(sweep, ScheduleHistory(storage, sweep.name), clock)
    context.history.refresh()
    if not context.state.number and not read_only:
        storage.check()
    return context
