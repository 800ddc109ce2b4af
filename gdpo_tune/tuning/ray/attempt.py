"""One attempt at a trial inside a Ray actor: the only adapter between `train()` and Ray Tune.

Actors are reused, so torch, TRL and the policy stay warm, until their memory passes a limit.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune

from gdpo_tune.core import registry
from gdpo_tune.core.errors import (
    CrowdedGpuError,
    DirectoryLostError,
    DiskFullError,
    EngineMemoryError,
    SandboxUnavailable,
    StoreError,
    StoreUnreachableError,
    TrialFailure,
    UsageError,
)
from gdpo_tune.core.files import build_disk_full_error, is_disk_full
from gdpo_tune.core.http import OUTAGE_SECONDS, build_retry
from gdpo_tune.core.object_store import StoreDirectory, find_cache_directory, join_address
from gdpo_tune.core.system import (
    clear_rendezvous,
    find_process,
    identify_start,
    read_machine_memory,
)
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trial_files import (
    MARKER,
    NEWEST_KEPT,
    TRIALS,
    find_checkpoint_name,
    is_kept,
    is_marker,
    iterate_whole_checkpoints,
    may_differ,
    sort_checkpoints,
)
from gdpo_tune.core.trials import Measurement, Outcome, parse_step
from gdpo_tune.training.checkpoints import find_checkpoint, find_newest_checkpoint
from gdpo_tune.tuning.attempts import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    RunSettings,
    StopFlag,
    TrialNotice,
    TrialPlaced,
    TrialResult,
    TrialUpdate,
    unwrap_attempt,
    wrap_for_ray,
)
from gdpo_tune.tuning.ray.head_store import read_shared_variables

NODE_DIED = "its node has died"
"""In the message of Ray's error, which has no type of its own, for a process lost that way."""
MEMORY_SHARE = 0.6
"""Share of a node's memory that all reused trial processes on it together may grow to."""

SECONDS = 1.0
"""Time after which the next measurement reaches the driver, kept or not: a person is watching."""
RAY_DIRECTORY = "ray"
"""In the sweep's directory: working directory of Ray; deleted at the end."""
TRIAL_TOKEN = "begun"
"""File that distinguishes a trial from an earlier one with its number, of a lost ledger."""

_trials_served = 0


def run_trial(config: dict[str, Any]) -> dict[str, Any]:
    """Run an attempt; discard it if the sweep's directory was unavailable.

    Raises:
        AttemptError: start again; see `watch_directory` and `run_attempt`.
    """
    read_shared_variables()
    attempt = unwrap_attempt(config)
    tune.report(wrap_for_ray(describe_place()))
    try:
        with watch_directory(attempt.setup):
            return wrap_for_ray(run_attempt(attempt))
    except DirectoryLostError as error:
        return wrap_for_ray(Fatal(error))


def describe_place() -> TrialPlaced:
    """Tell the driver where this process runs."""
    context = ray.get_runtime_context()
    return TrialPlaced(context.get_actor_id() or "", context.get_node_id())


@contextmanager
def watch_directory(setup: RunSettings) -> Generator[None]:
    """Discard what the block returns or raises if the sweep's directory was away meanwhile.

    Raises:
        AttemptError: start again; the directory was away, and is back.
        DirectoryLostError: it stays away.
    """
    cause = None
    try:
        yield
    except Exception as error:
        if has_directory(setup):
            raise
        cause = error
    if cause is None and has_directory(setup):
        return
    from tenacity import RetryError, retry_if_result

    retrying = build_retry(OUTAGE_SECONDS, retry=retry_if_result(lambda present: not present))
    try:
        retrying(has_directory, setup)
    except RetryError:
        raise DirectoryLostError(
            f"{setup.spec_file.parent} is gone, or read-only, since {OUTAGE_SECONDS:g} s\n"
            "    fix: mount it again, and run the same command to resume from the last complete "
            "checkpoints"
        ) from None
    waited = retrying.statistics["idle_for"]
    reason = f"the sweep's directory was away; waited {waited:.0f} s for it"
    raise AttemptError("directory", reason) from cause


def run_attempt(attempt: AttemptConfig) -> TrialResult:
    """Train one trial in this process, unless the process has grown too large.

    Raises:
        AttemptError: start again in a fresh process, or since a node or the store was lost.
        Exception: anything unexpected; Ray starts the trial again, from its newest checkpoint.
    """
    global _trials_served
    rss = psutil.Process().memory_info().rss
    if _trials_served and rss > compute_memory_limit(attempt.setup.cpus, attempt.setup.gpus):
        raise AttemptError("needs_new_process", "the process has grown too large")
    _trials_served += 1
    clear_rendezvous()
    if attempt.setup.address:
        return run_remote_attempt(attempt)
    return train_from_checkpoint(attempt, Reporter(attempt))


def train_from_checkpoint(attempt: AttemptConfig, reporter: Reporter) -> TrialResult:
    """Train a trial, from the newest checkpoint in its directory if any; see `run_attempt`."""
    trial = attempt.trial
    checkpoints = find_checkpoint(trial.directory)
    try:
        if attempt.setup.workers == 1:
            train = registry.load(attempt.setup.train)
            outcome: Outcome | None = train(trial, resume=checkpoints.newest, report=reporter)
        else:
            from gdpo_tune.tuning.ray.workers import train_in_group  # only now: Ray Train is large

            outcome = train_in_group(attempt)
    except SystemExit:
        if not reporter.stopped:
            raise  # Ray ends the trial
        return Interrupted()
    except CrowdedGpuError as error:
        raise AttemptError("gpu_contention", str(error)) from error
    except EngineMemoryError as error:
        raise AttemptError("needs_new_process", str(error)) from error
    except TrialFailure as failure:
        return Failed(str(failure))
    except (UsageError, SandboxUnavailable, DiskFullError) as error:
        return Fatal(error)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Fatal(build_disk_full_error(trial.directory, "the trial", error))
    if outcome is None:
        return Interrupted()
    note = checkpoints.describe_damage()
    if note:
        outcome = replace(outcome, environment={**outcome.environment, "resumed": note})
    return Finished(outcome)


def compute_memory_limit(cpus: float, gpus: float = 0.0) -> float:
    """Return the bytes above which a process with these CPU cores and GPUs takes no new trial.

    All that fit on this node together may grow to `MEMORY_SHARE` of its memory, or its container's.
    """
    memory = read_machine_memory() or psutil.virtual_memory().total
    # a process that waits for others may run on a node without a core for trials
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


def has_directory(setup: RunSettings) -> bool:
    """Return whether this process can write to the sweep's directory, if the sweep has one.

    A lost mount leaves an empty directory: it counts only while the sweep's spec is in it.
    """
    try:
        return bool(setup.address) or (
            setup.spec_file.exists() and os.access(setup.spec_file.parent, os.W_OK)
        )
    except OSError:  # of a mount whose server is gone
        return False


class Reporter:
    """The `report` of one trial: thins what goes to the driver, and stops on request.

    Where many trials run, measurements on which nothing is decided are in the trial's file alone.
    Ray lets a trial continue after a result only once the driver has handled it. So a decision
    about a rung arrives here before the next step; several processes get it a step later.
    """

    def __init__(self, attempt: AttemptConfig) -> None:
        trial, self._setup = attempt.trial, attempt.setup
        self.stopped = False  # True if it has ended the trial
        self.upload: Callable[[], None] | None = None
        """Called with each new checkpoint, before the driver hears of it."""
        self._number = attempt.number
        self._last = trial.training.steps
        directory = self._setup.spec_file.parent
        self._stop_flag = StopFlag(directory, self._setup.address, patience=0.0)
        self._sent = float("-inf")

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Pass a measurement on if it is due.

        Raises:
            SystemExit: the sweep was interrupted, or the scheduler stopped the trial; callers free
                their resources in `finally`.
            AttemptError: the directory is away; what the trial has just written is lost.
        """
        if not has_directory(self._setup):
            raise AttemptError("directory", f"{self._setup.spec_file.parent} is away")
        if checkpoint is not None and self.upload is not None:
            self.upload()
        stop, due = self.decide(measurement)
        if due and not stop:
            self.send(wrap_for_ray(TrialUpdate(measurement)))
            stop = measurement.has_validation and self.is_halted()
        if stop:
            self.stopped = True
            raise SystemExit

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Return whether to stop, and whether the measurement is due."""
        now, kept = time.monotonic(), is_kept(measurement.step, self._last)
        pause = self._setup.interval if kept else max(self._setup.interval, SECONDS)
        due = measurement.has_validation or now - self._sent >= pause
        if due:
            self._sent = now
        return self._stop_flag.is_set(self._number), due

    def is_halted(self) -> bool:
        """Return whether the driver has decided against the trial because of the last result."""
        return self._stop_flag.is_set(self._number)

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on to the driver."""
        tune.report(result)


def run_remote_attempt(attempt: AttemptConfig) -> TrialResult:
    """Train a trial in a copy of its directory, which is on an object store; see `run_attempt`."""
    trial, directory = attempt.trial, make_attempt_directory(attempt.trial.directory.name)
    local = replace(trial, directory=directory / TRIALS / trial.directory.name)
    try:
        reporter = Reporter(attempt)

        def send_notice(text: str) -> None:
            reporter.send(wrap_for_ray(TrialNotice(text)))

        address = join_address(attempt.setup.address, TRIALS, trial.directory.name)
        files = StoreDirectory(address, say=send_notice)
        download_trial(files, local.directory, attempt.trial_token)
        parts: list[TrainedPart] = []
        for index, part in enumerate(trial.parts):
            target = directory / "parts" / str(index)
            _download_policy(attempt, part.checkpoint, target, send_notice)
            parts.append(replace(part, checkpoint=target / part.checkpoint.name))
        start = download_start(attempt, send_notice)
        local = replace(local, parts=tuple(parts), start=start)
        upload = reporter.upload = partial(upload_trial, files, local.directory, local.keep_at)
        try:
            result = train_from_checkpoint(replace(attempt, trial=local), reporter)
        except Exception as error:
            if not isinstance(error, StoreUnreachableError):
                upload()  # its measurements explain the error
            raise
        upload()
    except StoreUnreachableError as error:
        raise AttemptError("store", error.summary, error) from error
    except StoreError as error:
        return Fatal(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if isinstance(result, Finished) and result.outcome.checkpoint is not None:
        checkpoint = trial.directory / result.outcome.checkpoint.name  # as the driver sees it
        return Finished(replace(result.outcome, checkpoint=checkpoint))
    return result


def make_attempt_directory(trial: str) -> Path:
    """Return an empty directory for a trial of this process; delete those of ended processes."""
    host = socket.gethostname()
    own = find_attempt_directory(trial)
    for path in own.parent.glob("*_*_*_*"):
        owner, other, start, _ = path.name.rsplit("_", 3)
        if path == own or (owner == host and find_process(int(other), start) is None):
            shutil.rmtree(path, ignore_errors=True)
    own.mkdir(parents=True)
    return own


def find_attempt_directory(name: str) -> Path:
    """Return the directory of this process for a trial, or something else of that name."""
    pid, host = os.getpid(), socket.gethostname()
    own = f"{host}_{pid}_{identify_start(pid)}_{name}"
    return find_cache_directory() / "attempts" / own


def download_trial(files: StoreDirectory, directory: Path, token: str) -> None:
    """Fetch the newest complete checkpoint and the small files; delete those with another token."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = files.list_sizes()
    if files.read(TRIAL_TOKEN) != token.encode():
        files.delete(sizes)
        files.write(TRIAL_TOKEN, token.encode())
        return
    for checkpoint in (None, *iterate_whole_checkpoints(sizes, files.read)):
        wanted = [name for name in sizes if find_checkpoint_name(name) == checkpoint]
        files.download({name: directory / name for name in wanted})
        if checkpoint is not None and find_newest_checkpoint(directory) is not None:
            return  # otherwise it is damaged, and the checkpoint before it is tried


def download_start(attempt: AttemptConfig, say: Callable[[str], None]) -> Path | None:
    """Fetch the policy after the supervised start, once for all trials of this process."""
    start = attempt.trial.start
    if start is None:
        return None
    name = f"start-{start.parent.name}"
    here = find_attempt_directory(name) / start.name
    if not (here / MARKER).exists():
        _download_policy(attempt, start, make_attempt_directory(name), say)
    return here


def _download_policy(
    attempt: AttemptConfig, checkpoint: Path, target: Path, say: Callable[[str], None]
) -> None:
    trial, name = checkpoint.parent.name, checkpoint.name
    files = StoreDirectory(join_address(attempt.setup.address, TRIALS, trial), say=say)
    wanted = [file for file in files.list_sizes() if find_checkpoint_name(file) == name]
    files.download({file: target / file for file in wanted})


def upload_trial(files: StoreDirectory, directory: Path, keep_at: Collection[int] = ()) -> None:
    """Send a trial's new files, and drop all checkpoints but the newest and those at `keep_at`."""
    sizes = files.list_sizes()
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    local = {name: path for name, path in paths.items() if path.is_file() and name[0] != "."}
    checkpoints = sort_checkpoints(filter(is_marker, {*sizes, *local}))
    kept = [None, *checkpoints[:NEWEST_KEPT], *(c for c in checkpoints if parse_step(c) in keep_at)]
    new = [name for name, path in local.items() if may_differ(path, sizes.get(name))]
    files.upload({name: local[name] for name in new if find_checkpoint_name(name) in kept})
    files.delete(
        name
        for name in sizes
        if (checkpoint := find_checkpoint_name(name)) not in kept
        # such as the optimizer of a checkpoint that only may become a candidate
        or (checkpoint is not None and f"{checkpoint}/{MARKER}" in local and name not in local)
    )
