"""One attempt at a trial inside a Ray actor: the only adapter between `train()` and Ray Tune.

Actors are reused, so torch, TRL and the policy stay warm, until their memory passes a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import psutil
import ray

from gdpo_tune.core import registry
from gdpo_tune.core.errors import (
    CrowdedGpuError,
    DirectoryLostError,
    DiskFullError,
    EngineMemoryError,
    SandboxUnavailable,
    TrialFailure,
    UsageError,
)
from gdpo_tune.core.files import build_disk_full_error, is_disk_full
from gdpo_tune.core.http import PATIENCE, build_retry
from gdpo_tune.core.system import clear_rendezvous, read_machine_memory
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Outcome
from gdpo_tune.training.checkpoints import find_checkpoint
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    Setup,
    TrialResult,
    pack,
    unpack_attempt,
)
from gdpo_tune.tuning.ray.remote_attempts import run_remote_attempt
from gdpo_tune.tuning.ray.reporter import Reporter, has_directory
from gdpo_tune.tuning.ray.variables import read_shared_variables

MEMORY_SHARE = 0.6
"""Share of a node's memory that all reused trial processes on it together may grow to."""

_trials_served = 0


def run_trial(config: dict[str, Any]) -> dict[str, Any]:
    """Run an attempt; it does not count if the sweep's directory was away meanwhile.

    Raises:
        AttemptError: start again; the directory was away, and is back. See also `run_attempt`.
    """
    read_shared_variables()
    attempt = unpack_attempt(config)
    return pack(guard_directory(attempt, lambda: run_attempt(attempt)))


def guard_directory(attempt: AttemptConfig, run: Callable[[], TrialResult]) -> TrialResult:
    """Return the result of an attempt, unless the sweep's directory was away meanwhile.

    Raises:
        AttemptError: start again; the directory was away, and is back.
        Exception: from `run`.
    """
    cause = None
    try:
        result = run()
        if has_directory(attempt.setup):
            return result
    except Exception as error:
        if has_directory(attempt.setup):
            raise
        cause = error
    try:
        waited = wait_for_directory(attempt.setup)
    except DirectoryLostError as error:
        return Fatal(error)
    raise AttemptError("directory", waited) from cause


def wait_for_directory(setup: Setup) -> str:
    """Wait until the sweep's directory is back; return what has happened, for a person.

    Raises:
        DirectoryLostError: it stays away.
    """
    from tenacity import RetryError, retry_if_result

    retrying = build_retry(PATIENCE, retry=retry_if_result(lambda present: not present))
    try:
        retrying(has_directory, setup)
    except RetryError:
        raise DirectoryLostError(
            f"{setup.spec_file.parent} is gone, or cannot be written to, since {PATIENCE:g} s\n"
            "    fix: mount it again, and run the same command to resume from the last complete "
            "checkpoints"
        ) from None
    waited = retrying.statistics["idle_for"]
    return f"the sweep's directory was away; waited {waited:.0f} s for it"


def run_attempt(attempt: AttemptConfig) -> TrialResult:
    """Train one trial in this process, unless it is given up or the process has grown too large.

    Raises:
        AttemptError: start again in a fresh process, or since a node or the store was lost.
        Exception: anything unexpected; Ray starts the trial again, from its newest checkpoint.
    """
    global _trials_served
    if attempt.refusal is not None:
        return attempt.refusal
    rss = psutil.Process().memory_info().rss
    if _trials_served and rss > compute_memory_limit(attempt.setup.cpus, attempt.setup.gpus):
        raise AttemptError("changed", "the process has grown too large")
    _trials_served += 1

    def train(trial: TrialConfig, **options: Any) -> Outcome:
        clear_rendezvous()
        return registry.load(attempt.setup.train)(trial, **options)

    is_alone = attempt.setup.workers == 1
    return train_where_stored(attempt, partial(Reporter, attempt), train if is_alone else None)


def train_where_stored(
    attempt: AttemptConfig,
    build_reporter: Callable[[], Reporter],
    train: Callable[..., Outcome] | None,
) -> TrialResult:
    """Train a trial in its directory, or in a copy of it where that is on an object store.

    `train` is that of `gdpo_tune.training`; None: processes of the trial's own train it.
    """
    if not attempt.setup.address:
        return train_from_checkpoint(attempt, build_reporter(), train)
    return run_remote_attempt(attempt, build_reporter, partial(train_from_checkpoint, train=train))


def train_from_checkpoint(
    attempt: AttemptConfig, reporter: Reporter, train: Callable[..., Outcome] | None
) -> TrialResult:
    """Train a trial, from the newest checkpoint in its directory if any; see `run_attempt`."""
    trial = attempt.trial
    checkpoints = find_checkpoint(trial.directory)
    try:
        if train is None:
            from gdpo_tune.tuning.ray.workers import train_in_group  # only now: Ray Train is large

            outcome = train_in_group(attempt, checkpoints.newest)
        else:
            outcome = train(trial, resume=checkpoints.newest, report=reporter)
    except SystemExit:
        if not reporter.stopped:
            raise  # Ray ends the trial
        return Interrupted()
    except CrowdedGpuError as error:
        raise AttemptError("crowded", str(error)) from error
    except EngineMemoryError as error:
        raise AttemptError("changed", str(error)) from error
    except TrialFailure as failure:
        return Failed(str(failure))
    except (UsageError, SandboxUnavailable, DiskFullError) as error:
        return Fatal(error)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Fatal(build_disk_full_error(trial.directory, "the trial"))
    if outcome is None:
        return Interrupted()
    note = checkpoints.describe_damage()
    if note:
        outcome = replace(outcome, environment={**outcome.environment, "resumed": note})
    return Finished(outcome)


def compute_memory_limit(cpus: float, gpus: float = 0.0) -> float:
    """Return the bytes above which a process of so many CPU cores and GPUs takes no new trial.

    All that fit on this node together may grow to `MEMORY_SHARE` of its memory, or its container's.
    A process that waits for others may run on a node without a core for trials.
    """
    memory = read_machine_memory() or psutil.virtual_memory().total
    share = cpus / max(cpus, count_on_node("CPU"))
    if gpus:
        share = max(share, gpus / max(gpus, count_on_node("GPU")))
    return memory * MEMORY_SHARE * share


@cache
def count_on_node(resource: str) -> float:
    """Return how many CPU cores (`CPU`) or GPUs Ray hands out on the node of this process."""
    own = ray.get_runtime_context().get_node_id()
    nodes = (node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    return sum(resources.get(resource, 0.0) for resources in nodes)
