"""The state of one schedule: a JSON file beside its sweeps, which the holder of a lock changes.

    <directory>/schedule.json  all that a decision depends on
                lock           held while a process decides, and acts
                jobs/          directories of jobs, for some backends

A change replaces the whole file. A process that is killed leaves the state before or after it.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat

from gdpo_tune.clusters.schedule_spec import Occasion
from gdpo_tune.core.errors import BackendUnreachableError, LedgerHeldError, StoreError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.locks import Lease
from gdpo_tune.core.object_store import build_store_error

LOCK_SECONDS, POLL_SECONDS = 120.0, 0.1
"""Longest wait for a process that decides on the same schedule, and between two attempts."""
KEPT_RUNS, KEPT_NOTICES = 100, 100
MONTH, DAY = timedelta(days=30), timedelta(hours=24)

EndState = Literal["finished", "failed", "stopped"]
EventKind = Literal[
    "seen",
    "queued",
    "skipped",
    "started",
    "submitted",
    "state_changed",
    "stopping",
    "retried",
    "ended",
    "sent",
    "not_sent",
]
ACTIVE = ("starting", "running")
"""States of a run that has not ended."""
Time = Annotated[
    AwareDatetime, Ge(datetime(1970, 1, 1, tzinfo=UTC)), Le(datetime(9000, 1, 1, tzinfo=UTC))
]
"""A time by a clock that may be wrong, far enough from the ends of the calendar."""
Hours = Annotated[FiniteFloat, Ge(0)]
Number = Annotated[int, Ge(0), Le(2**53)]


class Record(BaseModel):
    """JSON that is refused if it was damaged or forged: other code relies on its types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JobHandle(Record):
    """How a backend finds a job again."""

    backend: str
    id: str
    directory: str = ""
    """Directory with its logs; for `local` and `slurm`."""
    machine: str = ""
    """Host name; for `local`, as is the next one."""
    processes: list[Annotated[tuple[int, str | FiniteFloat], Field(strict=False)]] = []
    """Pid and start of supervisor and sweep, see `core.system.find_process`."""


class ScheduledRun(Record):
    """One sweep that a schedule has started."""

    name: str
    due: Time
    identity: str
    """Identity of the sweep's spec: runs of one identity can be compared."""
    began: Time
    """When it was started, or resumed by `run` after its end."""
    is_manual: bool = False
    """True if `schedule run` has started it, not the schedule."""
    gpu_hours_limit: Hours | None = None
    """GPU-hours that it may spend, over all its attempts."""
    attempt: Number = 1
    earlier_attempts: Number = 0
    """Attempts before it was resumed; they do not count towards `max_attempts`."""
    state: Literal["starting", "running"] | EndState = "starting"
    """`starting`: claimed, but no backend is known to have its newest attempt."""
    not_before: Time | None = None
    """When the newest attempt may be submitted; None: at once."""
    job: JobHandle | None = None
    """Its newest attempt; None until a backend has taken it."""
    state_problem: str = ""
    """Why it is unknown whether the job runs, and what to do; empty if it is known."""
    stop_reason: str = ""
    """Why it is to stop; empty if it is not."""
    stop_since: Time | None = None
    spent: list[tuple[Time, Hours]] = []
    """GPU-hours, and when they became known."""
    summary: str = ""
    """Its end in words."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours spent, as far as they are known."""
        return sum(hours for _, hours in self.spent)


class Notice(Record):
    """An end of a run, or times without a run: news for the webhook."""

    number: Number
    """Number of the change that it belongs to."""
    at: Time
    occasion: Occasion
    text: str
    details: dict[str, Any]
    skipped: tuple[Time, Time] | None = None
    """First and last time without a run."""
    why: str = ""
    """Why they have none: `missed`, `overlap`, `budget`, `disabled` or `stopped`."""
    delivery: Literal["pending", "failed", "sent"] = "pending"


class ScheduleState(Record):
    """All data that a decision depends on."""

    number: Number = 0
    """Changes so far."""
    schedule: str | None = None
    """The schedule as `tick` last saw it; empty: disabled or none, None: never seen."""
    since: Time | None = None
    """When this schedule was first seen: no earlier time of it is due."""
    handled: Time | None = None
    """Latest time of the schedule that was started, skipped or queued; so were all before it."""
    queued: Time | None = None
    """Time whose run waits until the active one ends."""
    is_queued_manually: bool = False
    runs: list[ScheduledRun] = []
    """In the order of their last start or resumption. Only the last one can be active."""
    notices: list[Notice] = []

    @property
    def active(self) -> ScheduledRun | None:
        """The run that has not ended; there is one at most."""
        return self.runs[-1] if self.runs and self.runs[-1].state in ACTIVE else None

    @property
    def due_after(self) -> datetime | None:
        """Time after which times of the schedule are due; None if the schedule was never seen.

        After a clock that was ahead it lies in the future, and nothing is due.
        """
        return max((time for time in (self.since, self.handled) if time), default=None)

    def find_run(self, due: datetime) -> ScheduledRun | None:
        """Return the run of a time."""
        return next((run for run in reversed(self.runs) if run.due == due), None)

    def sum_gpu_hours(self, now: datetime) -> float:
        """Sum the GPU-hours of the last 30 days, and later ones of a clock that was ahead."""
        return sum(hours for run in self.runs for at, hours in run.spent if now - MONTH < at)

    def mark_handled(self, due: datetime) -> None:
        """Note that a time of the schedule, and all before it, need nothing more."""
        self.handled = max(due, self.handled or due)

    def add_run(self, run: ScheduledRun) -> None:
        """Append a new or resumed run; after a month forget all but `KEPT_RUNS`."""
        others = [each for each in self.runs if each is not run]
        recent = [each for each in others[:-KEPT_RUNS] if run.began - each.began < MONTH]
        self.runs = [*recent, *others[-KEPT_RUNS:], run]

    def add_notice(
        self, at: datetime, occasion: Occasion, text: str, details: dict[str, Any]
    ) -> Notice:
        """Append a notice; after a day forget all but `KEPT_NOTICES`."""
        number = self.number + 1
        notice = Notice(number=number, at=at, occasion=occasion, text=text, details=details)
        recent = [each for each in self.notices[:-KEPT_NOTICES] if at - each.at < DAY]
        self.notices = [*recent, *self.notices[-KEPT_NOTICES:], notice]
        return notice


@dataclass(frozen=True)
class ScheduleEvent:
    """One change of a schedule's state."""

    kind: EventKind
    at: datetime
    text: str = ""
    """The change in words; empty if it is of no interest to a person."""


class ScheduleHistory:
    """The state of one schedule, as it was last read or written here."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "schedule.json"
        self.state = ScheduleState()

    def read(self) -> None:
        """Read the state; refuse one that is damaged."""
        try:
            self.state = ScheduleState.model_validate_json(self.file.read_bytes())
        except FileNotFoundError:
            self.state = ScheduleState()
        except OSError as error:
            raise build_store_error(str(self.directory), error) from error
        except ValueError as error:  # pydantic's errors are of this kind
            raise StoreError(
                f"{self.file} is damaged, or was written by a later version\n    fix: restore it, "
                "update this package, or move it aside to begin a new history"
            ) from error

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keep other processes from changing the state, and read it.

        Raises:
            BackendUnreachableError: another process has held the lock for `LOCK_SECONDS`.
            StoreError: the directory cannot be written, or the state is damaged.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                lease = Lease(self.directory / "lock")
                break
            except LedgerHeldError as error:
                if time.monotonic() > deadline:
                    held = str(error).partition(";")[0]
                    raise BackendUnreachableError(
                        f"{held}\n    fix: wait until it has ended, or end that process"
                    ) from None
            except OSError as error:
                raise build_store_error(str(self.directory), error) from error
            time.sleep(POLL_SECONDS)
        try:
            self.read()
            yield
        finally:
            lease.release()

    def save(self) -> None:
        """Write the changed state; raise a `StoreError` if it cannot be written."""
        self.state.number += 1
        try:
            write_atomically(
                self.file, self.state.model_dump_json(exclude_defaults=True, by_alias=True)
            )
        except OSError as error:
            raise build_store_error(str(self.directory), error) from error
