"""One training in several processes of this machine, as `gdpo_tune.train` runs it without Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from gdpo_tune.core import registry
from gdpo_tune.core.errors import GdpoTuneError, TrialFailure
from gdpo_tune.core.system import RENDEZVOUS, find_free_port
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome, Report
from gdpo_tune.training import distributed

TRAIN = "gdpo_tune.training:train"
DIED = TrialFailure("one of its processes died (killed, out of memory, or crashed)")
DEATH_SECONDS = 2.0
"""Time within which the death of a process explains an error of another one."""


class _Progress(NamedTuple):
    """Call of `report` in the first process, which waits for the answer: whether to stop."""

    measurement: Measurement
    checkpoint: Path | None


class _End(NamedTuple):
    """End of a process: with its outcome or its error; without both if it was stopped."""

    outcome: Outcome | None = None
    error: Exception | None = None


def train_in_processes(
    config: TrialConfig, workers: int, *, resume: Path | None, report: Report, train: str = TRAIN
) -> Outcome:
    """Train in `workers` new processes, each on the GPU with its number; see `training.train`.

    `report` is called in this process, and may raise `SystemExit`: then all of them stop. If one
    fails, the others are killed.

    Raises:
        TrialFailure: one of them was killed or crashed.
        Exception: one of them raised it.
    """
    context = multiprocessing.get_context("spawn")
    meeting = (str(workers), "127.0.0.1", str(find_free_port()))
    processes: dict[Connection, SpawnProcess] = {}
    try:
        for rank in range(workers):
            ours, theirs = context.Pipe()
            variables: dict[str, str] = dict(
                zip(RENDEZVOUS, (str(rank), str(rank), *meeting), strict=True)
            )
            variables["OMP_NUM_THREADS"] = str(config.threads)  # accelerate warns without it
            arguments = (train, config, resume, variables, theirs)
            processes[ours] = context.Process(target=_train_in_process, args=arguments)
            processes[ours].start()
            theirs.close()  # else the end of the process would not be seen
        outcome = _follow(processes, report)
        for process in processes.values():
            process.join()
        return outcome
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _follow(processes: Mapping[Connection, SpawnProcess], report: Report) -> Outcome:
    """Pass on what the first process reports until all have ended; return its outcome."""
    running, outcomes = list(processes), dict[Connection, Outcome]()
    stop: SystemExit | None = None
    while running:
        ready: Any = wait(running)
        for connection in ready:
            message = _receive(connection)
            if isinstance(message, _Progress):
                try:
                    report(message.measurement, message.checkpoint)
                except SystemExit as asked:
                    stop = asked
                with suppress(BrokenPipeError):  # its death is seen at the next message
                    connection.send(stop is not None)
                continue
            running.remove(connection)
            if message.error is not None:
                raise _find_cause(message.error, processes.values())
            if message.outcome is not None:
                outcomes[connection] = message.outcome
    if stop is not None:
        raise stop
    return outcomes[next(iter(processes))]


def _receive(connection: Connection) -> _Progress | _End:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise DIED from None


def _find_cause(error: Exception, processes: Iterable[SpawnProcess]) -> Exception:
    """Return why a training ended: one that was killed breaks the exchange of the others."""
    if isinstance(error, GdpoTuneError) or not wait(
        [process.sentinel for process in processes], timeout=DEATH_SECONDS
    ):
        return error
    return DIED


def _train_in_process(
    train: str,
    config: TrialConfig,
    resume: Path | None,
    variables: Mapping[str, str],
    connection: Connection,
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal sends it to all processes; the parent stops them. An ignored signal would stay
        # ignored in what they start.
        signal.signal(number, lambda _number, _frame: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(variables)
    stopped = False

    def report(measurement: Measurement, checkpoint: Path | None) -> None:
        nonlocal stopped
        if distributed.is_first():
            connection.send(_Progress(measurement, checkpoint))
            stopped = connection.recv()
        stopped = distributed.broadcast_from_first(stopped)
        if stopped:
            raise SystemExit

    try:
        connection.send(_End(registry.load(train)(config, resume=resume, report=report)))
    except SystemExit:
        if not stopped:
            raise
        connection.send(_End())
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        connection.send(_End(error=error))
        threading.Event().wait()  # its end would be an error of the others


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
