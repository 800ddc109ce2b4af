"""Attempts at trials whose directories are on an object store.

A trial trains in a directory of its attempt alone, which begins empty and is deleted afterwards. So
it never resumes from files that an earlier attempt, or another sweep, left on a node.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.object_store import StoreDirectory, find_cache_directory, join_address
from gdpo_tune.core.system import find_process, identify_start
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trial_files import (
    MARKER,
    find_checkpoint_name,
    is_marker,
    iterate_whole_checkpoints,
    sort_checkpoints,
)
from gdpo_tune.core.trials import parse_step
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    AttemptError,
    Fatal,
    Finished,
    TrialNotice,
    TrialResult,
    pack,
)
from gdpo_tune.tuning.ray.reporter import Reporter

BEGUN = "begun"
"""File that distinguishes a trial from an earlier one with its number, of a lost ledger."""
KEPT = 2
"""Checkpoints of a running trial in the store, as on a disk."""


def run_remote_attempt(
    attempt: AttemptConfig,
    build_reporter: Callable[[], Reporter],
    train: Callable[[AttemptConfig, Reporter], TrialResult],
) -> TrialResult:
    """Train a trial, with `train`, in a copy of its directory; see `trainable.run_attempt`."""
    trial, directory = attempt.trial, make_attempt_directory(attempt.trial.directory.name)
    local = replace(trial, directory=directory / "trials" / trial.directory.name)
    try:
        reporter = build_reporter()

        def send_notice(text: str) -> None:
            reporter.send(pack(TrialNotice(text)))

        address = join_address(attempt.setup.address, "trials", trial.directory.name)
        files = StoreDirectory(address, say=send_notice)
        download_trial(files, local.directory, attempt.begun)
        local = replace(local, parts=download_parts(attempt, directory, send_notice))
        upload = reporter.upload = partial(upload_trial, files, local.directory, local.keep_at)
        try:
            result = train(replace(attempt, trial=local), reporter)
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
    """Return an empty directory for a trial of this process, which may have several at once.

    Delete those of processes that have ended.
    """
    pid, host = os.getpid(), socket.gethostname()
    name = f"{host}_{pid}_{identify_start(pid)}_{trial}"
    own = find_cache_directory() / "attempts" / name
    for path in own.parent.glob(f"{host}_*_*_*"):
        other, start, _ = path.name.removeprefix(f"{host}_").split("_")
        if path == own or find_process(int(other), start) is None:
            shutil.rmtree(path, ignore_errors=True)
    own.mkdir(parents=True)
    return own


def download_trial(files: StoreDirectory, directory: Path, begun: str) -> None:
    """Fetch what a trial resumes from: its newest complete checkpoint and its small files.

    Files of another trial that had its number, whose `begun` differs, are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sizes = files.list_sizes()
    if files.read(BEGUN) != begun.encode():
        files.delete(sizes)
        files.write(BEGUN, begun.encode())
        return
    for checkpoint in (None, *iterate_whole_checkpoints(sizes, files.read)):
        wanted = [name for name in sizes if find_checkpoint_name(name) == checkpoint]
        files.download({name: directory / name for name in wanted})
        if checkpoint is not None and find_newest_checkpoint(directory) is not None:
            return  # otherwise it is damaged, and the checkpoint before it is tried


def download_parts(
    attempt: AttemptConfig, directory: Path, say: Callable[[str], None]
) -> tuple[TrainedPart, ...]:
    """Fetch the policies that a merge or checkpoint consists of; return them with local paths."""
    parts: list[TrainedPart] = []
    for index, part in enumerate(attempt.trial.parts):
        trial, name = part.checkpoint.parent.name, part.checkpoint.name
        files = StoreDirectory(join_address(attempt.setup.address, "trials", trial), say=say)
        wanted = [file for file in files.list_sizes() if find_checkpoint_name(file) == name]
        target = directory / "parts" / str(index)
        files.download({file: target / file for file in wanted})
        parts.append(replace(part, checkpoint=target / name))
    return tuple(parts)


def upload_trial(files: StoreDirectory, directory: Path, keep_at: Collection[int] = ()) -> None:
    """Send a trial's new files, and drop old checkpoints in the store.

    The two newest stay, and those at the steps `keep_at`. Files of equal size count as equal: those
    that change only grow.
    """
    sizes = files.list_sizes()
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    local = {name: path for name, path in paths.items() if path.is_file() and name[0] != "."}
    checkpoints = sort_checkpoints(filter(is_marker, {*sizes, *local}))
    kept = [None, *checkpoints[:KEPT], *(c for c in checkpoints if parse_step(c) in keep_at)]
    new = [name for name, path in local.items() if path.stat().st_size != sizes.get(name)]
    files.upload({name: local[name] for name in new if find_checkpoint_name(name) in kept})
    files.delete(
        name
        for name in sizes
        if (checkpoint := find_checkpoint_name(name)) not in kept
        # such as the optimizer of a checkpoint that only may become a candidate
        or (checkpoint is not None and f"{checkpoint}/{MARKER}" in local and name not in local)
    )
