"""What each kind of event says, and what each backend knows a job by.

A history lies where others may write, and disks break. What was damaged or forged is refused where
it is read, since everything behind that takes it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AwareDatetime, BaseModel, ConfigDict, FiniteFloat

Time = Annotated[
    AwareDatetime, Ge(datetime(1970, 1, 1, tzinfo=UTC)), Le(datetime(9000, 1, 1, tzinfo=UTC))
]
"""By a clock that may be wrong, and far enough from both ends of the calendar to count on."""
Hours = Annotated[FiniteFloat, Ge(0)]
Number = Annotated[int, Ge(1), Le(2**53)]


class Shape(BaseModel):
    """JSON that must have some keys; a later version may write more of them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Noted(Shape):
    """Any event."""

    at: Time


class Seen(Noted):
    """A schedule came into force."""

    schedule: str


class Started(Noted):
    """A run was claimed."""

    run: str
    tick: Time
    identity: str
    gpu_hours_limit: Hours | None = None
    asked: bool = False


class Submitted(Noted):
    """A backend has an attempt."""

    run: str
    attempt: Number
    job: dict[str, Any]


class Retried(Noted):
    """A run was claimed once more."""

    run: str
    attempt: Number
    why: str = ""
    not_before: Time | None = None
    gpu_hours_limit: Hours | None = None
    asked: bool = False


class Stopping(Noted):
    """A run is to end."""

    run: str
    why: str


class Against(Shape):
    """A run beside an earlier one."""

    verdict: str
    hypervolume_ratio: FiniteFloat | None
    interval: tuple[FiniteFloat | None, FiniteFloat | None]


class NotCompared(Shape):
    """A run without the earlier one, which could not be read."""

    unknown: str


class Ended(Noted):
    """A run has ended; `outcome.figures` says what it came to."""

    run: str
    attempt: Number
    state: Literal["finished", "failed", "stopped"]
    reason: str = ""
    unknown: str = ""
    gpu_hours: Hours = 0.0
    trials: int = 0
    front: int = 0
    hypervolume: float = 0.0
    hypervolume_interval: tuple[float, float] = (0.0, 0.0)
    comparison: Against | NotCompared | None = None


class Queued(Noted):
    """A time waits for the run under way."""

    tick: Time
    asked: bool = False


class Skipped(Noted):
    """Times have no run."""

    first: Time
    last: Time
    count: Number
    why: str
    reason: str = ""
    asked: bool = False


class Told(Noted):
    """Somebody was told of an event, or could not be."""

    of: Number
    why: str = ""


EVENTS: Mapping[str, type[Noted]] = {
    "seen": Seen,
    "started": Started,
    "submitted": Submitted,
    "retried": Retried,
    "stopping": Stopping,
    "ended": Ended,
    "queued": Queued,
    "skipped": Skipped,
    "told": Told,
    "untold": Told,
}
"""Kind of event -> what it says."""


class NamedJob(Shape):
    """A job that its backend finds by name."""

    id: str


class BatchJob(NamedJob):
    """A job of Slurm, and its folder."""

    folder: str


class LocalJob(Shape):
    """Processes of a machine."""

    folder: str
    machine: str
    processes: tuple[tuple[int, float], tuple[int, float]]
    """Of supervisor and sweep: id, and time of creation."""
