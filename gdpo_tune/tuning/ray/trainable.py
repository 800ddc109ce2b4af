"""One trial inside a Ray actor: the only adapter between `train()` and Ray Tune.

Actors are reused, so torch, TRL and the policy stay warm; a fresh one is asked for once a process
has grown past its memory limit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray

from gdpo_tune.core import registry
from gdpo_tune.core.errors import (
    DiskFullError,
    FolderLostError,
    SandboxUnavailable,
    TrialFailure,
    UsageError,
)
from gdpo_tune.core.files import disk_full, is_disk_full
from gdpo_tune.core.memory import machine_memory
from gdpo_tune.core.trials import Outcome, TrialConfig
from gdpo_tune.training.checkpoints import find_checkpoint
from gdpo_tune.tuning.ray.folder import FolderAwayError
from gdpo_tune.tuning.ray.lost import ActorWornOut
from gdpo_tune.tuning.ray.reporter import Reporter
from gdpo_tune.tuning.ray.setup import Setup

MEMORY_SHARE = 0.6
"""Share of a node's memory that all reused trial processes on it together may grow to."""
GIVEN_UP = "given_up"
"""In a trial's config: why it is not tried again; an error if every other trial would meet it."""

_trials_served = 0


def run_trial(config: dict[str, Any]) -> dict[str, Any]:
    """`serve`, but that nothing counts which comes about while the sweep's folder is away.

    Raises:
        FolderAwayError: start again, since the folder was away; it is back.
        Exception: see `serve`.
    """
    setup: Setup = config["setup"]
    folder = setup.folder
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
    from gdpo_tune.tuning.ray.stored import attempt_on_store

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
        from gdpo_tune.tuning.ray.workers import train_in_group

        return train_in_group(trial, setup, setup.group, resume, reporter.ends_at)
    try:
        return registry.load(setup.train)(trial, resume=resume, report=reporter)
    except SystemExit:
        if not reporter.stopped:
            raise
        return None
