"""One trial inside a Ray actor: the only adapter between `train()` and Ray Tune.

Actors are reused, so torch, TRL and the policy stay warm; a fresh one is asked for once a process
has grown past its memory limit.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune
from ray.exceptions import RayActorError

from gdpo_tune import registry
from gdpo_tune.errors import (
    DiskFullError,
    FolderLostError,
    SandboxUnavailable,
    StoreUnreachableError,
    TrialFailure,
    UsageError,
)
from gdpo_tune.files import disk_full, is_disk_full
from gdpo_tune.memory import machine_memory
from gdpo_tune.steps import is_kept
from gdpo_tune.training.checkpoints import find_checkpoint
from gdpo_tune.trials import Measurement, Outcome, TrialConfig
from gdpo_tune.tuning.folder import Folder, FolderAwayError

SECONDS = 1.0
"""Time after which the next measurement reaches the driver, kept or not: a person is watching."""
RESULTS_A_SECOND = 200
"""Of all trials together, on which nothing is decided: Ray Tune's loop alone takes about a
millisecond of CPU for one where a thousand trials run, see docs/scale.md."""
MEMORY_SHARE = 0.6
"""Share of a node's memory that all reused trial processes on it together may grow to."""


class ActorWornOut(RayActorError):
    """This process has grown too large: the trial wants a fresh one. Not a failure of the trial.

    Ray counts a process that was taken away as no attempt, and gives a trial that lost its process
    another one; so it hears of this one in those words.
    """

    def __init__(self) -> None:
        super().__init__(error_msg="the process has grown too large", preempted=True)


class StoreAwayError(RayActorError):
    """A node does not reach the store. Not a failure of the trial, and in words that Ray does not
    take for one."""

    def __init__(self, error: StoreUnreachableError) -> None:
        super().__init__(error_msg=str(error), preempted=True)
        self.error = error

    def __reduce__(self) -> tuple[type[StoreAwayError], tuple[StoreUnreachableError]]:
        return type(self), (self.error,)


class NodeLostError(RayActorError):
    """A process of a trial was lost with its node. Not a failure of the trial, and in words that
    Ray does not take for one."""

    def __init__(self) -> None:
        super().__init__(error_msg="the node of one of the trial's processes died", preempted=True)


NODE_DIED = "its node has died"
"""In the message of Ray's error, which has no type of its own, for a process lost that way."""
GIVEN_UP = "given_up"
"""In a trial's config: why it is not tried again; an error if every other trial would meet it."""


class WorkerDiedError(Exception):
    """One of the processes of a trial ended without a word."""


@dataclass(frozen=True)
class Group:
    """Several processes for each trial."""

    workers: int
    cpus: float
    """CPU cores of each."""
    gpus: float
    """GPUs of each."""
    folder: Path
    """Where Ray Train keeps what it wants to keep; on a disk that every node sees."""


@dataclass(frozen=True)
class Store:
    """Where trials are kept that share no disk with the driver."""

    address: str
    """Of the sweep."""
    window: str
    """Name of the actor that looks for what asks trials to end: see `tuning.window`."""


@dataclass(frozen=True)
class Setup:
    """What every trial of a run has in common."""

    train: str
    """`module:function`, `gdpo_tune.training:train` except in tests."""
    stop: Path
    """File that asks running trials to stop; on a disk that every node sees."""
    cpus: float
    """CPU cores of a process."""
    group: Group | None = None
    """None: a trial is one process, this one."""
    pace: float = 0.0
    """Least seconds between two results of a trial on which nothing is decided."""
    store: Store | None = None
    """None: trials have their folders on a disk that every node sees."""
    folder: Folder | None = None
    """That of the sweep on this disk; None: there is none that could go away."""

    def __deepcopy__(self, memo: object) -> Setup:
        """Itself, since nothing in it ever changes: Ray copies the config of every trial."""
        return self

    def __str__(self) -> str:
        """Short: Ray makes a label of it."""
        return self.train


def pace_of(slots: int) -> float:
    """Seconds between results of each of so many trials at which the driver keeps up with all."""
    return slots / RESULTS_A_SECOND if slots > RESULTS_A_SECOND else 0.0


_trials_served = 0


def run_trial(config: dict[str, Any]) -> dict[str, Any]:
    """`serve`, but that nothing counts which comes about while the sweep's folder is away.

    Raises:
        FolderAwayError: start again, since the folder was away; it is back.
        Exception: see `serve`.
    """
    folder: Folder | None = config["setup"].folder
    cause: Exception | None = None
    try:
        ended = serve(config)
    except Exception as error:
        if folder is None or folder.is_there():
            raise
        cause = error
    else:
        if folder is None or folder.is_there():
            return ended
    try:
        waited = folder.wait()
    except FolderLostError as error:
        return {"fatal": error}
    raise FolderAwayError(waited) from cause


def serve(config: dict[str, Any]) -> dict[str, Any]:
    """Train one trial and return how it ended.

    Args:
        config: `trial`, a `TrialConfig`; `setup`, a `Setup`; `ends_at`, steps after which the trial
            ends whatever the driver says; `begun`, what tells it from another trial that had its
            number; `GIVEN_UP`, why it is not to be tried again, if so.

    Returns:
        `outcome`: an `Outcome`; or `failure`: why the trial cannot go on, not worth a retry; or
        `fatal`: an error that every other trial would meet too, such as a full disk; or
        `interrupted`: true; the driver asked it to end, or it ended where it was to.

    Raises:
        ActorWornOut: start again in a fresh process.
        NodeLostError: start again, since one of several processes lost its node.
        Exception: anything unexpected; Ray starts the trial again, from its newest checkpoint.
    """
    global _trials_served
    trial: TrialConfig = config["trial"]
    setup: Setup = config["setup"]
    if GIVEN_UP in config:
        why: str | Exception = config[GIVEN_UP]
        return {"failure": why} if isinstance(why, str) else {"fatal": why}
    if _trials_served and psutil.Process().memory_info().rss > memory_limit(setup.cpus):
        raise ActorWornOut
    _trials_served += 1
    if setup.store is None:
        ends_at = config["ends_at"]
        reporter = Reporter(trial, setup.stop, ends_at, setup.pace, setup.folder)
        return attempt(trial, setup, reporter)
    # Only who keeps trials on an object store pays for importing what reaches it.
    from gdpo_tune.tuning.stored import attempt_on_store

    return attempt_on_store(trial, setup, setup.store, config)


def attempt(trial: TrialConfig, setup: Setup, reporter: Reporter) -> dict[str, Any]:
    """Train a trial from the newest checkpoint in its folder on; see `serve`."""
    found = find_checkpoint(trial.directory)
    try:
        outcome = train(trial, setup, found.newest, reporter)
    except TrialFailure as failure:
        return {"failure": str(failure)}
    except (UsageError, SandboxUnavailable, DiskFullError) as error:
        return {"fatal": error}
    except OSError as error:
        if not is_disk_full(error):
            raise
        return {"fatal": disk_full(trial.directory, "the trial")}
    if outcome is None:
        return {"interrupted": True}
    if found.note():
        known = {**outcome.environment, "resumed": found.note()}
        outcome = replace(outcome, environment=known)
    return {"outcome": outcome}


def memory_limit(cpus: float) -> float:
    """Bytes of resident memory above which a process of so many CPU cores takes no new trial.

    All that fit on this node together may grow to `MEMORY_SHARE` of its memory, or its container's.
    One that waits for others may lie on a node without a core for trials.
    """
    memory = machine_memory() or psutil.virtual_memory().total
    return memory * MEMORY_SHARE * cpus / max(cpus, node_cpus())


@cache
def node_cpus() -> float:
    """CPU cores that Ray hands out on the node of this process."""
    here = ray.get_runtime_context().get_node_id()
    return sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == here)


def train(
    trial: TrialConfig, setup: Setup, resume: Path | None, reporter: Reporter
) -> Outcome | None:
    """Train in this process, or in several others; None if the trial ended before its end."""
    if setup.group is not None:
        # Only who has several processes a trial pays for importing Ray Train.
        from gdpo_tune.tuning.workers import train_in_group

        return train_in_group(trial, setup, setup.group, resume, reporter.ends_at)
    try:
        return registry.load(setup.train)(trial, resume=resume, report=reporter)
    except SystemExit:
        if not reporter.stopped:
            raise
        return None


HALT = "halt"
"""File in a trial's folder that asks it alone to end."""


class Reporter:
    """The `report` of one trial: thins what goes to the driver, and stops on request.

    Where many trials run, what nobody waits for goes with the next result, so that curves keep all
    of their points and the driver has fewer results to deal with.

    Ray lets a trial go on from a result only once the driver has dealt with it, so what the driver
    decides about a rung is known here before the next step begins. Several processes of one trial
    hear of it a step later.
    """

    def __init__(
        self,
        trial: TrialConfig,
        stop: Path,
        ends_at: Collection[int] = (),
        pace: float = 0.0,
        folder: Folder | None = None,
    ) -> None:
        self.stopped = False
        """Whether it has ended the trial."""
        self._stop = stop
        self.ends_at = ends_at
        """Steps after which it ends the trial whatever the driver says."""
        self._folder = folder
        self._halt = trial.directory / HALT
        self._last = trial.training.steps
        self._pace = pace
        self._sent = float("-inf")
        self._held: list[Measurement] = []
        """To go with the next result."""

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Pass a measurement on if it is due.

        Raises:
            SystemExit: the sweep was interrupted, the scheduler stopped the trial, or it was to end
                at this step; what holds resources lets go in `finally`.
            FolderAwayError: what the trial has just written is nowhere.
        """
        if self._folder is not None:
            self._folder.check()
        stop, due = self.decide(measurement)
        if not due:
            self.hold(measurement)
        elif not stop:
            self.send(self.result(measurement))
            ends = measurement.step in self.ends_at
            stop = ends or (measurement.validated and self.halted())
        if stop:
            self.stopped = True
            raise SystemExit

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Whether to stop, and whether the measurement is due."""
        now, kept = self.now(), is_kept(measurement.step, self._last)
        pause = self._pace if kept else max(self._pace, SECONDS)
        due = measurement.validated or now - self._sent >= pause
        if due:
            self._sent = now
        return self.asked(), due

    def asked(self) -> bool:
        """Whether the driver wants the trial to end."""
        return self._stop.exists() or self._halt.exists()

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def hold(self, measurement: Measurement) -> None:
        """Keep a measurement for the next result, if its step is one that is passed on."""
        if is_kept(measurement.step, self._last):
            self._held.append(measurement)

    def result(self, measurement: Measurement) -> dict[str, Any]:
        """What the driver is told: a measurement, and those before it that were held back."""
        earlier, self._held = tuple(self._held), []
        return {"measurement": measurement, "earlier": earlier}

    def halted(self) -> bool:
        """Whether the driver has decided against the trial since it took the last result."""
        return self.asked()

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on to the driver."""
        tune.report(result)
