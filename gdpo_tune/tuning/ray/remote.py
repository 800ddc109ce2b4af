"""Attempts at trials whose directories are on an object store, and requests that they stop.

A trial trains in a directory of its process alone, which begins empty and is deleted afterwards. So
it never continues from files that an earlier attempt, or another sweep, left on a node.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from ray import tune

from gdpo_tune.core.checkpoint_names import (
    find_checkpoint_name,
    is_marker,
    iterate_whole_checkpoints,
    sort_checkpoints,
)
from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.object_store import ObjectFolder, cache_folder, joined
from gdpo_tune.core.processes import runs
from gdpo_tune.training.checkpoints import newest_valid_checkpoint
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
from gdpo_tune.tuning.ray.stopping import STOP, StopFlag
from gdpo_tune.tuning.ray.trainable import train_from_checkpoint

BEGUN = "begun"
"""File that tells a trial from an earlier one of its number, of a ledger that was lost."""
KEPT = 2
"""Checkpoints of a running trial in the store, as on a disk."""
ALL = "all"  # the request to all trials
ASK_SECONDS = 1.0
"""Between two questions of a trial whether it has to stop: short steps would ask all the time."""
ANSWER_SECONDS = 5.0
"""For which a step waits for the answer, and the driver until a request has arrived."""
REQUEST_PATIENCE = 60.0
"""Seconds for which a request is repeated."""


def run_remote_attempt(attempt: AttemptConfig) -> TrialResult:
    """Train a trial from its newest checkpoint in the store on; see `trainable.run_attempt`."""
    trial, directory = attempt.trial, make_attempt_directory()
    local = replace(trial, directory=directory / "trials" / trial.directory.name)
    try:
        address = joined(attempt.setup.address, "trials", trial.directory.name)
        files = ObjectFolder(address, say=send_notice)
        download_trial(files, local.directory, attempt.begun)
        upload = partial(upload_trial, files, local.directory)
        try:
            result = train_from_checkpoint(replace(attempt, trial=local), Reporter(attempt, upload))
        except Exception as error:
            if not isinstance(error, StoreUnreachableError):
                upload()  # its measurements explain the error
            raise
        upload()
    except StoreUnreachableError as error:
        raise AttemptError("store", error.what, error) from error
    except StoreError as error:
        return Fatal(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if isinstance(result, Finished) and result.outcome.checkpoint is not None:
        checkpoint = trial.directory / result.outcome.checkpoint.name  # as the driver sees it
        return Finished(replace(result.outcome, checkpoint=checkpoint))
    return result


def send_notice(text: str) -> None:
    """Tell the driver what this trial waits for."""
    tune.report(pack(TrialNotice(text)))


def make_attempt_directory() -> Path:
    """Return an empty directory for this process; delete those of processes that have ended."""
    process, host = psutil.Process(), socket.gethostname()
    own = cache_folder() / "attempts" / f"{host}_{process.pid}_{process.create_time():.2f}"
    for path in own.parent.glob(f"{host}_*_*"):
        pid, created = path.name.removeprefix(f"{host}_").split("_")
        if path == own or not runs(int(pid), float(created)):
            shutil.rmtree(path, ignore_errors=True)
    own.mkdir(parents=True)
    return own


def download_trial(files: ObjectFolder, directory: Path, begun: str) -> None:
    """Fetch what a trial continues from: its newest whole checkpoint and its small files.

    Args:
        files: the trial's directory in the store.
        directory: for the copies; created if missing.
        begun: tells this trial from another one that had its number.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sizes = files.sizes()
    if files.read(BEGUN) != begun.encode():
        files.delete(sizes)
        files.write(BEGUN, begun.encode())
        return
    for checkpoint in (None, *iterate_whole_checkpoints(sizes, files.read)):
        wanted = [name for name in sizes if find_checkpoint_name(name) == checkpoint]
        files.download({name: directory / name for name in wanted})
        if checkpoint is not None and newest_valid_checkpoint(directory) is not None:
            return  # otherwise a file has other content, and the one before serves


def upload_trial(files: ObjectFolder, directory: Path) -> None:
    """Send a trial's new files, and drop all but its two newest checkpoints in the store.

    Files of equal size are taken for equal: those that change only grow.
    """
    sizes = files.sizes()
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    local = {name: path for name, path in paths.items() if path.is_file() and name[0] != "."}
    kept = [None, *sort_checkpoints(filter(is_marker, {*sizes, *local}))[:KEPT]]
    new = [name for name, path in local.items() if path.stat().st_size != sizes.get(name)]
    files.upload({name: local[name] for name in new if find_checkpoint_name(name) in kept})
    files.delete(name for name in sizes if find_checkpoint_name(name) not in kept)


class RemoteStopFlag(StopFlag):
    """Requests as words of one small file in the sweep's object store: numbers of trials, or `all`.

    A thread talks to the store, so one that does not answer holds nobody up for long. A request is
    repeated for a while; a trial that gets no answer continues.
    """

    def __init__(self, address: str) -> None:
        self._files = ObjectFolder(address, patience=REQUEST_PATIENCE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stop-requests")
        self._requests: set[str] = set()
        self._answer: Future[bool] = Future()
        self._answer.set_result(False)
        self._asked = float("-inf")

    def request(self, trial: int | None = None) -> None:
        """See `StopFlag`."""
        self._requests.add(ALL if trial is None else str(trial))
        self._call(self._files.write, STOP, self._content())

    def withdraw(self, trial: int) -> None:
        """See `StopFlag`."""
        self._requests.discard(str(trial))
        self._call(self._files.write, STOP, self._content())

    def clear(self) -> None:
        """See `StopFlag`."""
        self._requests.clear()
        self._files.write(STOP, self._content())

    def is_set(self, trial: int, *, now: bool = False) -> bool:
        """See `StopFlag`; without `now`, the store is asked once in a while."""
        if self._answer.done() and (now or time.monotonic() - self._asked >= ASK_SECONDS):
            self._asked = time.monotonic()
            self._answer = self._call(self._find, ALL, str(trial))
        answer = self._answer
        return answer.done() and answer.exception() is None and answer.result()

    def _content(self) -> bytes:
        return " ".join(sorted(self._requests)).encode()

    def _find(self, *words: str) -> bool:
        return not set(words).isdisjoint((self._files.read(STOP) or b"").decode().split())

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let the thread call a method, and wait for a moment until it is done."""
        call = self._thread.submit(method, *arguments)
        wait([call], ANSWER_SECONDS)
        return call
