"""The state of one schedule, and the write-once files that keep it beside its sweeps.

    <storage>/.schedule/<name>/00000007.json   the state after seven changes

There is no other state. A change writes all of it into the file of the next number, which is
created only if it does not exist: if two processes write at once, one fails, reads the newer state
and decides again. The newest file counts; the last `KEPT_STATES` stay.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat

from gdpo_tune.clusters.schedule_spec import Occasion
from gdpo_tune.core.errors import StoreError
from gdpo_tune.core.object_store import build_store_error, is_url, open_filesystem


class ScheduleStorage:
    """Write-once files, on disk or in an object store; names are relative, with `/`.

    `create` alone decides which of two processes was first. On a disk, NFS included, it is a hard
    link, which fails if the name exists. In an object store it is a conditional write
    (`If-None-Match: *` on S3); `check` finds out whether a store ignores the condition.

    Every method raises a `StoreError` if the storage cannot be used.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._on_disk = not is_url(address)
        url = f"file://{os.path.abspath(address)}" if self._on_disk else address
        self._files, self._root = open_filesystem(url)

    def create(self, name: str, content: bytes) -> None:
        """Create a whole file; raise a `FileExistsError` if it exists already."""
        with self._explain_errors(FileExistsError):
            if self._on_disk:
                path = Path(self._root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
                try:
                    with aside.open("xb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                    os.link(aside, path)
                finally:
                    aside.unlink(missing_ok=True)
            else:
                self._files.pipe_file(f"{self._root}/{name}", content, mode="create")

    def list_names(self, directory: str) -> list[str]:
        """Return the names of the files in a directory; an empty list if it does not exist."""
        with suppress(FileNotFoundError), self._explain_errors(FileNotFoundError):
            paths = self._files.ls(f"{self._root}/{directory}", detail=False)
            return sorted(str(path).rpartition("/")[2] for path in paths)
        return []

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._explain_errors():
            return self._files.cat_file(f"{self._root}/{name}")

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError), self._explain_errors(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def check(self) -> None:
        """Refuse a storage in which files cannot be created, or can be created twice."""
        name = f".schedule/probe-{uuid.uuid4().hex}"
        self.create(name, b"")
        try:
            self.create(name, b"")
        except FileExistsError:
            return
        finally:
            self.delete(name)
        raise StoreError(
            f"storage {self.address}: a file can be created there twice, so two processes could "
            "start the same run\n    fix: use a store with conditional writes, such as S3"
        )

    @contextmanager
    def _explain_errors(self, *expected: type[OSError]) -> Generator[None]:
        try:
            yield
        except expected:
            raise
        except Exception as error:  # each store has its own errors for credentials and networks
            raise build_store_error(self.address, error) from error


STATE_FILE = re.compile(r"(\d{8})\.json")
KEPT_STATES, KEPT_RUNS, KEPT_NOTICES = 20, 100, 100
MONTH, DAY = timedelta(days=30), timedelta(hours=24)
UNREAD = -1

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


def _store_as(key: str) -> Any:
    return Field(validation_alias=key, serialization_alias=key)


class Record(BaseModel):
    """JSON that is refused if it was damaged or forged: other code relies on its types."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


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
    is_manual: Annotated[bool, _store_as("by_name")] = False
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
    state_problem: Annotated[str, _store_as("unknown")] = ""
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
    is_queued_manually: Annotated[bool, _store_as("queued_by_name")] = False
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
    """The newest state of one schedule, as it was read or written here."""

    def __init__(self, storage: ScheduleStorage, name: str) -> None:
        self.storage = storage
        self.directory = f".schedule/{name}"
        self.state = ScheduleState()
        self._number = 0

    def refresh(self) -> None:
        """Read the state if it has changed; refuse one that is damaged or older than before."""
        newest = max(self._list_numbers(), default=0)
        if newest < self._number:
            raise StoreError(
                f"storage {self.storage.address}: {self.directory} has fewer changes than before\n"
                "    fix: nothing if it was moved aside on purpose: the next call begins a history"
            )
        if newest != self._number:
            self.state = self._read(newest)
            self._number = newest

    def save(self) -> bool:
        """Write the changed state; if another process was first, read its state and return False.

        Raises:
            StoreError: it cannot be written; the next `refresh` reads the state again.
        """
        before, number = self._number, self._number + 1
        self._number, self.state.number = UNREAD, number
        content = self.state.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        try:
            self.storage.create(self._get_path(number), content)
        except FileExistsError:
            self.refresh()
            return False
        numbers = self._list_numbers()
        if before and before not in numbers:
            # this process has slept while others made more than KEPT_STATES changes
            self.storage.delete(self._get_path(number))
            self.refresh()
            return False
        self._number = number
        for old in numbers:
            if old <= number - KEPT_STATES:
                self.storage.delete(self._get_path(old))
        return True

    def _read(self, number: int) -> ScheduleState:
        if not number:
            return ScheduleState()
        try:
            state = ScheduleState.model_validate_json(self.storage.read(self._get_path(number)))
            if state.number != number:
                raise ValueError(f"it is the state after {state.number} changes")
        except ValueError as error:  # pydantic's errors are of this kind
            raise StoreError(
                f"storage {self.storage.address}: {self._get_path(number)} is damaged, or was "
                "written by a later version\n    fix: restore it, update this package, or move the "
                "directory aside to begin a new history"
            ) from error
        return state

    def _list_numbers(self) -> list[int]:
        names = self.storage.list_names(self.directory)
        return sorted(int(match[1]) for match in map(STATE_FILE.fullmatch, names) if match)

    def _get_path(self, number: int) -> str:
        return f"{self.directory}/{number:08}.json"
