"""What the driver and the process of a trial tell each other, in one key of Ray's dicts.

The driver sends an `AttemptConfig`. The process answers with any number of `TrialUpdate` and
`TrialNotice`, and a `TrialResult` at the end, or it raises one of the errors below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.trials import Measurement, Outcome, TrialConfig

KEY = "gdpo_tune"
NODE_DIED = "its node has died"
"""In the message of Ray's error, which has no type of its own, for a process lost that way."""
Cause = Literal["changed", "lost", "directory", "store", "died", "own"]
"""Why an attempt ended: it asked for another process; it lost its node; the sweep's directory was
away; its node did not reach the store; its process died for an unknown reason; it raised an error.
"""


@dataclass(frozen=True)
class WorkerGroup:
    """Several processes for each trial."""

    workers: int
    cpus: float
    """CPU cores of each."""
    gpus: float
    """GPUs of each."""
    directory: Path
    """Working directory of Ray Train; on a disk that every node sees."""


@dataclass(frozen=True)
class Setup:
    """What every trial of a run has in common."""

    train: str
    """`module:function`, `gdpo_tune.training:train` except in tests."""
    spec_file: Path
    """In the sweep's directory, which every node sees unless there is an address."""
    cpus: float
    """CPU cores of a process."""
    group: WorkerGroup | None = None
    """None: a trial is one process, this one."""
    interval: float = 0.0
    """Least seconds between two results of a trial on which nothing is decided."""
    address: str = ""
    """Of the sweep on an object store; nodes share no directory then."""


@dataclass(frozen=True)
class AttemptConfig:
    """What one attempt at a trial gets."""

    trial: TrialConfig
    setup: Setup
    ends_at: Sequence[int] = ()
    """Steps after which the trial ends whatever the driver says."""
    begun: str = ""
    """Tells the trial from another one that had its number."""
    given_up: str | Exception | None = None
    """Why it is not tried again; an error if every other trial would meet it."""

    def __deepcopy__(self, memo: object) -> AttemptConfig:
        """Return itself, since nothing in it ever changes: Ray copies the config of every trial."""
        return self

    def __str__(self) -> str:
        """Return a short text: Ray makes a label of it."""
        return str(self.trial)


@dataclass(frozen=True)
class TrialUpdate:
    """A measurement of a running trial."""

    measurement: Measurement
    earlier: Sequence[Measurement] = ()
    """Those before it that were held back, by step; nothing was measured on validation prompts."""


@dataclass(frozen=True)
class TrialNotice:
    """A line for a person about what a running trial waits for."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The trial came to its end."""

    outcome: Outcome


@dataclass(frozen=True)
class Failed:
    """The trial cannot go on, and another attempt would not help."""

    reason: str


@dataclass(frozen=True)
class Fatal:
    """An error that every other trial would meet too, such as a full disk."""

    error: Exception


@dataclass(frozen=True)
class Interrupted:
    """The driver asked the trial to end, or it ended where it was to."""


TrialResult = Finished | Failed | Fatal | Interrupted
TrialMessage = TrialUpdate | TrialNotice | TrialResult


def pack(content: AttemptConfig | TrialMessage) -> dict[str, Any]:
    """Return the dict that Ray wants."""
    return {KEY: content}


def unpack_attempt(config: Mapping[str, Any]) -> AttemptConfig:
    """Return what `pack` put into the config of a trial."""
    return config[KEY]


def unpack_message(result: Mapping[str, Any] | None) -> TrialMessage | None:
    """Return what `pack` put into a result of a trial; None if it is one of Ray's own."""
    return (result or {}).get(KEY)


class AttemptError(Exception):
    """End of an attempt that is no failure of the trial."""

    why: ClassVar[Cause]


class ActorWornOut(AttemptError):
    """This process has grown too large: the trial wants a fresh one."""

    why = "changed"


class NodeLostError(AttemptError):
    """A process of a trial was lost with its node."""

    why = "lost"


class DirectoryAwayError(AttemptError):
    """The sweep's directory was away."""

    why = "directory"


class StoreAwayError(AttemptError):
    """A node does not reach the object store; the argument is the outage."""

    why = "store"

    @property
    def outage(self) -> StoreUnreachableError:
        """The error of the store."""
        return self.args[0]

    def __str__(self) -> str:
        return self.outage.what


class WorkerDiedError(Exception):
    """One of the processes of a trial ended without an error: this counts as an attempt."""
