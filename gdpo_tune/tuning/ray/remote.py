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
from gdpo_tune.core.trials import Measurement
from gdpo_tune.training.checkpoints import newest_valid_checkpoint
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    Fatal,
    Finished,
    StoreAwayError,
    TrialNotice,
    TrialResult,
    pack,
)
from gdpo_tune.tuning.ray.reporter import Reporter
from gdpo_tune.tuning.ray.stopping import StopFlag
from gdpo_tune.tuning.ray.trainable import train_from_checkpoint

BEGUN = "begun"
"""File that tells a trial from an earlier one of its number, of a ledger that was lost."""
KEPT = 2
"""Checkpoints of a running trial in the store, as on a disk."""
ALL = "all"
"""Key of the request to all trials."""
ASK_SECONDS = 1.0
"""Between two questions of a trial whether it has to stop: short steps would ask all the time."""
ANSWER_SECONDS = 5.0
"""For which a step waits for the answer, and the driver until a request has arrived."""
REQUEST_PATIENCE = 60.0
"""Seconds for which a request is repeated."""


def run_remote_attempt(attempt: AttemptConfig) -> TrialResult:
    """Train a trial from its newest checkpoint in the store on; see `trainable.run_attempt`.

    Raises:
        StoreAwayError: the store has not answered for a long time.
    """
    trial, address = attempt.trial, attempt.setup.address
    directory = make_attempt_directory()
    try:
        local = replace(trial, directory=directory / "trials" / trial.directory.name)
        files = ObjectFolder(joined(address, "trials", trial.directory.name), say=send_notice)
        remote = RemoteTrial(files, local.directory)
        remote.download(attempt.begun)
        reporter = RemoteReporter(attempt, remote)
        try:
            result = train_from_checkpoint(replace(attempt, trial=local), reporter)
        except StoreUnreachableError:
            raise
        except Exception:
            remote.upload()  # its measurements explain the error
            raise
        remote.upload()
    except StoreUnreachableError as error:
        raise StoreAwayError(error) from error
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


class RemoteTrial:
    """A trial's directory on an object store, and its copy on this machine.

    Files of equal size are taken for equal: those that change only grow. All methods raise
    `StoreError` and `StoreUnreachableError` as `ObjectFolder` does.
    """

    def __init__(self, files: ObjectFolder, directory: Path) -> None:
        self._files = files
        self._directory = directory

    def download(self, begun: str) -> None:
        """Fetch what the trial continues from: its newest whole checkpoint and its small files.

        Args:
            begun: tells this trial from another one that had its number.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        sizes = self._files.sizes()
        if self._files.read(BEGUN) != begun.encode():
            self._files.delete(sizes)
            self._files.write(BEGUN, begun.encode())
            return
        self._download(sizes, None)
        for checkpoint in iterate_whole_checkpoints(sizes, self._files.read):
            self._download(sizes, checkpoint)
            if newest_valid_checkpoint(self._directory) is not None:
                return  # otherwise a file has other content, and the one before serves

    def upload(self) -> None:
        """Send files that are new, and drop all but the two newest checkpoints there."""
        sizes = self._files.sizes()
        paths = {p.relative_to(self._directory).as_posix(): p for p in self._directory.rglob("*")}
        local = {n: p for n, p in paths.items() if p.is_file() and not n.startswith(".")}
        names = {*sizes, *local}
        kept = [None, *sort_checkpoints(filter(is_marker, names))[:KEPT]]
        self._files.upload(
            {
                name: path
                for name, path in local.items()
                if path.stat().st_size != sizes.get(name) and find_checkpoint_name(name) in kept
            }
        )
        self._files.delete(name for name in sizes if find_checkpoint_name(name) not in kept)

    def _download(self, names: dict[str, int], checkpoint: str | None) -> None:
        wanted = [name for name in names if find_checkpoint_name(name) == checkpoint]
        self._files.download({name: self._directory / name for name in wanted})


class RemoteReporter(Reporter):
    """The `report` of such a trial: the driver hears of a checkpoint once the store has it."""

    def __init__(self, attempt: AttemptConfig, remote: RemoteTrial) -> None:
        super().__init__(attempt)
        self._remote = remote

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Send the checkpoint, then report as `Reporter` does."""
        if checkpoint is not None:
            self._remote.upload()
        super().__call__(measurement, checkpoint)


class RemoteStopFlag(StopFlag):
    """Requests as keys of the sweep's object store.

    A thread talks to the store, so one that does not answer holds nobody up for long. A request is
    repeated for a while; a trial that gets no answer continues.
    """

    def __init__(self, address: str) -> None:
        self._files = ObjectFolder(joined(address, "stop"), patience=REQUEST_PATIENCE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stop-requests")
        self._answer: Future[bool] = Future()
        self._answer.set_result(False)
        self._asked = float("-inf")

    def request(self, trial: int | None = None) -> None:
        """See `StopFlag`."""
        self._call(self._files.write, ALL if trial is None else str(trial), b"")

    def withdraw(self, trial: int) -> None:
        """See `StopFlag`."""
        self._call(self._files.delete, [str(trial)])

    def clear(self) -> None:
        """See `StopFlag`."""
        self._files.delete(self._files.sizes())

    def is_set(self, trial: int, *, now: bool = False) -> bool:
        """See `StopFlag`; without `now`, the store is asked once in a while."""
        if self._answer.done() and (now or time.monotonic() - self._asked >= ASK_SECONDS):
            self._asked = time.monotonic()
            self._answer = self._call(self._find, ALL, str(trial))
        answer = self._answer
        return answer.done() and answer.exception() is None and answer.result()

    def _find(self, *names: str) -> bool:
        return any(self._files.read(name) is not None for name in names)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let the thread call a method, and wait for a moment until it is done."""
        call = self._thread.submit(method, *arguments)
        wait([call], ANSWER_SECONDS)
        return call
