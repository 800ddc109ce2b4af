"""Messages between the driver and the processes of trials, in one key of Ray's dicts.

The driver sends an `AttemptConfig`. The process answers with any number of `TrialUpdate` and
`TrialNotice`, and a `TrialResult` at the end, or it raises one of the errors below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome

KEY = "gdpo_tune"
NODE_DIED = "its node has died"
"""In the message of Ray's error, which has no type of its own, for a process lost that way."""
RESULTS_A_SECOND = 200
"""Limit over all trials, for results on which nothing is decided: Ray Tune's loop alone takes about
a millisecond of CPU for one result while a thousand trials run, see docs/scale.md."""
Cause = Literal["changed", "lost", "directory", "store", "crowded", "host", "died", "own"]
"""Why an attempt ended: it needed another process; it lost its node; the sweep's directory was
away; its node did not reach the store; others held the memory of its GPU; the process that it
shared with other trials died; its own process died for an unknown reason; it raised an error."""


@dataclass(frozen=True)
class Setup:
    """Settings that all trials of a run share."""

    train: str
    """`module:function`, `gdpo_tune.training:train` except in tests; where trials share processes,
    `module:class` of `gdpo_tune.training.packs:Pack`."""
    spec_file: Path
    """In the sweep's directory, which every node sees unless `address` is set."""
    address: str = ""
    """Address of the sweep on an object store; nodes share no directory then."""
    workers: int = 1
    """Processes of a trial."""
    cpus: float = 1.0
    gpus: float = 0.0
    """CPU cores and GPUs of each process."""
    pack: int = 1
    """Trials that share a process."""
    interval: float = 0.0
    """Least seconds between two results of a trial on which nothing is decided."""

    def __str__(self) -> str:
        """Return a short text: Ray makes a label of it where trials share a process."""
        return "pack"


@dataclass(frozen=True)
class AttemptConfig:
    """Input of one attempt at a trial."""

    trial: TrialConfig
    setup: Setup
    ends_at: Sequence[int] = ()
    """Steps after which the trial ends whatever the driver says."""
    begun: str = ""
    """Distinguishes the trial from another one that had its number."""

    @property
    def number(self) -> int:
        """Number of the trial."""
        return int(self.trial.directory.name)

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
    """Those before it that were held back, by step; none was measured on validation prompts."""


@dataclass(frozen=True)
class TrialNotice:
    """A line for a person about what a running trial waits for."""

    text: str


@dataclass(frozen=True)
class TrialPlaced:
    """The trial has begun."""

    process: str
    """Name of its process, which may have served others."""
    node: str
    """Id of its node."""


@dataclass(frozen=True)
class Finished:
    """The trial came to its end."""

    outcome: Outcome


@dataclass(frozen=True)
class Failed:
    """The trial cannot continue, and another attempt would not help."""

    reason: str


@dataclass(frozen=True)
class Fatal:
    """An error that every other trial would meet too, such as a full disk."""

    error: Exception


@dataclass(frozen=True)
class Interrupted:
    """The driver asked the trial to end, or the trial reached a step of `ends_at`."""


TrialResult = Finished | Failed | Fatal | Interrupted
TrialMessage = TrialUpdate | TrialNotice | TrialPlaced | TrialResult


def choose_interval(slots: int) -> float:
    """Return the seconds between results of each of so many trials that the driver can handle."""
    return slots / RESULTS_A_SECOND if slots > RESULTS_A_SECOND else 0.0


def pack(content: AttemptConfig | TrialMessage) -> dict[str, Any]:
    """Return the dict that Ray expects."""
    return {KEY: content}


def unpack_attempt(config: Mapping[str, Any]) -> AttemptConfig:
    """Return what `pack` put into the config of a trial."""
    return config[KEY]


def unpack_message(result: Mapping[str, Any] | None) -> TrialMessage | None:
    """Return what `pack` put into a result of a trial; None if it is one of Ray's own."""
    return (result or {}).get(KEY)


@dataclass(frozen=True)
class AttemptFailure:
    """End of an attempt without a result, as the driver sees it."""

    cause: Cause
    reason: str
    """In one line, for the ledger."""
    traceback: str = ""
    node_died: bool = False
    """True if the error says that the node is lost, which its table may not show yet."""
    outage: StoreUnreachableError | None = None


class AttemptError(Exception):
    """End of an attempt whose cause is known; if it is the object store, with its outage."""

    def __init__(
        self, cause: Cause, message: str, outage: StoreUnreachableError | None = None
    ) -> None:
        super().__init__(cause, message, outage)
        self.cause: Cause = cause
        self.outage = outage

    def __str__(self) -> str:
        return self.args[1]
