"""Attempts at trials: what passes between the driver and their processes, and what is counted.

The driver sends an `AttemptConfig`, in one key of Ray's dicts. The process answers with any number
of `TrialUpdate` and `TrialNotice`, and a `TrialResult` at the end, or it raises an `AttemptError`.
A `StopFlag` asks it to end. For each trial the driver counts attempts in an `OpenTrial`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.object_store import StoreDirectory
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Measurement, Outcome, Rung

if TYPE_CHECKING:
    from gdpo_tune.tuning.schedulers import Verdict

KEY = "gdpo_tune"
Answer = Literal["WAIT", "FINISHED"]
"""Of the driver to a slot that is free: no trial now, or none any more."""
WAIT: Answer = "WAIT"
FINISHED: Answer = "FINISHED"
STOP = "stop"
"""File of the sweep with the trials that are asked to stop, see `StopFlag`."""
_ALL = "all"  # the request to all trials
RETRIES = 2
"""Further attempts after failures of a trial's own, each from its newest checkpoint."""
LOSSES = 5
"""Nodes that a trial may lose in a row without a result in between: it may make them fail. The
same number of times it may find its GPU crowded."""
EXCUSE_SECONDS = 60.0
"""Seconds after the death of a process within which the death of its node explains it."""
RESULTS_A_SECOND = 200
"""Limit over all trials, for results on which nothing is decided: Ray Tune's loop alone takes about
a millisecond of CPU for one result while a thousand trials run, see docs/scale.md."""
Cause = Literal[
    "needs_new_process",
    "lost",  # with its node
    "directory",  # the sweep's directory was away
    "store",  # its node did not reach the object store
    "gpu_contention",  # others held the memory of its GPU
    "died",  # its own process died for an unknown reason
    "error",  # it raised one
]
"""Why an attempt ended."""


@dataclass(frozen=True)
class RunSettings:
    """Settings that all trials of a run share."""

    train: str
    """`module:function` as `gdpo_tune.training:train`."""
    spec_file: Path
    """In the sweep's directory, which every node sees unless `address` is set."""
    address: str = ""
    """Address of the sweep on an object store; nodes share no directory then."""
    workers: int = 1
    """Processes of a trial."""
    cpus: float = 1.0
    gpus: float = 0.0
    """CPU cores and GPUs of each process."""
    interval: float = 0.0
    """Least seconds between two results of a trial on which nothing is decided."""


@dataclass(frozen=True, repr=False)
class AttemptConfig:
    """Input of one attempt at a trial."""

    trial: TrialConfig
    setup: RunSettings
    trial_token: str = ""
    """Distinguishes the trial from another one that had its number."""

    @property
    def number(self) -> int:
        """Number of the trial."""
        return int(self.trial.directory.name)

    def __deepcopy__(self, memo: object) -> AttemptConfig:
        """Return itself, since nothing in it ever changes: Ray copies the config of every trial."""
        return self

    def __repr__(self) -> str:
        """Return a short text: Ray makes a label of it, and a line for its log of every result."""
        return str(self.trial)


@dataclass(frozen=True)
class TrialUpdate:
    """A measurement of a running trial."""

    measurement: Measurement


@dataclass(frozen=True)
class TrialNotice:
    """A line for a person about what a running trial waits for."""

    text: str


@dataclass(frozen=True)
class TrialPlaced:
    """The trial has begun, in a process (which may have served others) on a node, by their ids."""

    process: str
    node: str


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
    """The driver asked the trial to end."""


TrialResult = Finished | Failed | Fatal | Interrupted
TrialMessage = TrialUpdate | TrialNotice | TrialPlaced | TrialResult


def choose_interval(slots: int) -> float:
    """Return the seconds between results of each of so many trials that the driver can handle."""
    return slots / RESULTS_A_SECOND if slots > RESULTS_A_SECOND else 0.0


def wrap_for_ray(content: object) -> dict[str, Any]:
    """Return the dict that Ray expects."""
    return {KEY: content}


def unwrap_attempt(config: Mapping[str, Any]) -> AttemptConfig:
    """Return what `wrap_for_ray` put into the config of a trial."""
    return config[KEY]


def unwrap_message(result: Mapping[str, Any] | None) -> TrialMessage | None:
    """Return what `wrap_for_ray` put into a result of a trial; None if it is one of Ray's own."""
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


@dataclass
class OpenTrial:
    """A trial of this session that has not ended: its attempt, and those before it that failed."""

    number: int
    node: str = ""
    verdict: tuple[Verdict, Rung | None] | None = None
    """Set once it is asked to stop; a person's request has no rung."""
    cost: Cost | None = None  # cost so far, in case it fails
    failed: int = 0  # attempts that failed by themselves
    lost: int = 0
    """Nodes lost, stores out of reach and GPUs crowded in a row, without a result in between."""
    died: tuple[str, float] | None = None
    """Node and time of the last death of its process: the node may turn out to have died, too."""
    moving: bool = False  # True if it has lost its node and has no other yet
    cut_from: str = ""  # node to whose process the connection was lost: the node may be lost, too
    given_up: str | Exception | None = None
    """Why it is not tried again, unless its node turns out to be lost before a slot is free; an
    error if every other trial would meet it."""

    def count_failure(self, failure: AttemptFailure, now: float) -> bool:
        """Count the end of the attempt under way; return whether there may be another one."""
        cause = failure.cause
        if cause in ("lost", "store", "gpu_contention"):
            self.lost += 1
            return self.lost <= LOSSES
        if cause == "died":
            self.died = self.node, now
        self.failed += 1
        return self.failed <= RETRIES

    def excuse(self, node: str, now: float) -> bool:
        """Count the last death as the loss of this node if it explains it; return whether."""
        if self.died is None or self.died[0] != node or now - self.died[1] > EXCUSE_SECONDS:
            return False
        self.failed -= 1
        self.lost += 1
        self.died = self.given_up = None
        return True


class StopFlag:
    """Requests of the driver that trials stop: words of one small file, numbers or `all`.

    The file is in the sweep's directory, which every node sees, or in its object store.
    """

    def __init__(self, directory: Path, address: str = "", *, patience: float = 60.0) -> None:
        """`patience` is how many seconds an object store is waited for."""
        self._path = directory / STOP
        self._store = StoreDirectory(address, patience=patience) if address else None
        self._requests: set[str] = set()

    def request(self, trial: int | None = None) -> None:
        """Ask one trial, or all, to stop at the next report."""
        self._write({*self._requests, _ALL if trial is None else str(trial)})

    def withdraw(self, trial: int) -> None:
        """Take back the request to one trial."""
        self._write(self._requests - {str(trial)})

    def clear(self) -> None:
        """Take back all requests, of an earlier run too."""
        self._write(set())

    def is_set(self, trial: int) -> bool:
        """Return whether a trial is asked to stop; one whose store does not answer is not."""
        content = b""
        if self._store is None:
            with suppress(FileNotFoundError):
                content = self._path.read_bytes()
        else:
            with suppress(StoreError, StoreUnreachableError):
                content = self._store.read(STOP) or b""
        return not {_ALL, str(trial)}.isdisjoint(content.decode().split())

    def _write(self, requests: set[str]) -> None:
        self._requests, content = requests, " ".join(sorted(requests)).encode()
        if self._store is not None:
            self._store.write(STOP, content)
        elif requests:
            write_atomically(self._path, content)
        else:
            self._path.unlink(missing_ok=True)
