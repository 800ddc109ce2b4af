"""`CodeSandbox`: workers in threads of their own, and batches for them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from queue import SimpleQueue

from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from ..core.memory import candidates_at_once, machine_memory
from .jobs import Job, Result, SandboxInfo
from .process import ELSEWHERE
from .threaded import Threaded, foreseeing
from .worker import Task, Worker, prepare

_LOGGER = logging.getLogger("gdpo_tune.sandbox")


class _Pool(Threaded):
    """Workers, locked in or not, and the batches that they share."""

    def __init__(self, workers: int, modules: tuple[str, ...], *, isolated: bool) -> None:
        super().__init__()
        if workers < 1:
            raise ValueError(f"{workers} workers cannot run anything")
        if sys.platform != "linux":
            reason = f"platform: the sandbox needs Linux, this is {sys.platform}"
            raise SandboxUnavailable(f"{reason}; {ELSEWHERE}")
        self._modules = modules
        self._isolated = isolated
        self._memory = machine_memory()
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._workers: list[Worker] = []
        self._handing_over = threading.Lock()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._layers = self._start(workers)
            undo.pop_all()

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in a fresh process; one result a job, in their order.

        Raises:
            SandboxInfraError: the sandbox itself failed repeatedly; no job gets a verdict then.
            ValueError, TypeError: a test has neither `assert` nor `raise`, or holds a value that
                cannot be sent; a job's limit exceeds the machine's memory; or it is closed.
            RuntimeError: this is a fork of the process that made this sandbox.
        """
        self._require_threads()
        jobs = list(jobs)
        workers = fitting_workers(len(self._threads), jobs, self._memory)
        batch = _Batch([prepare(index, job) for index, job in enumerate(jobs)])
        with self._handing_over:
            # NOTE: asked again, because behind the threads' last order nobody would find it.
            self._require_threads()
            for _ in range(workers):
                self._batches.put(batch)
        return batch.wait(workers)

    def close(self) -> None:
        """End every process, and jobs that are under way without a verdict; idempotent."""
        if self._is_forked():
            return
        with self._handing_over:
            self._closing.set()
            for _ in self._threads:
                self._batches.put(None)
        for worker in self._workers:
            worker.interrupt()
        for thread in self._threads:
            thread.join()

    def _start(self, workers: int) -> tuple[str, ...]:
        """Start every worker, side by side; the layers around one of them."""
        started: SimpleQueue[Worker | GdpoTuneError] = SimpleQueue()
        for number in range(workers):
            name = f"sandbox-{number}"
            thread = threading.Thread(target=self._work, args=(started,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                reason = f"threads: {number} of {workers} workers, then: {error}"
                raise SandboxUnavailable(reason) from error
            self._threads.append(thread)
        layers: tuple[str, ...] = ()
        for outcome in [started.get() for _ in self._threads]:
            if isinstance(outcome, GdpoTuneError):
                raise outcome
            layers = outcome.layers
        return layers

    def _work(self, started: SimpleQueue[Worker | GdpoTuneError]) -> None:
        try:
            worker = self._start_worker()
        except GdpoTuneError as error:
            started.put(error)
            return
        self._workers.append(worker)
        started.put(worker)
        try:
            while (batch := self._batches.get()) is not None:
                batch.run_on(worker)
        finally:
            worker.close()

    def _start_worker(self) -> Worker:
        try:
            return Worker(self._modules, isolated=self._isolated)
        except GdpoTuneError:
            raise
        except Exception as error:
            # Somebody waits for this thread's answer, so an unforeseen error must be one too.
            raise SandboxUnavailable(f"worker: cannot be started: {error!r}") from error


class CodeSandbox(_Pool):
    """Runs untrusted Python against tests; a context manager.

    Each worker is two processes, a zygote that forks candidates and a judge, and takes one
    candidate at a time. A batch runs on as many workers as `fitting_workers` finds memory for.
    All processes end with `close`, and with the process that made them, however that ends.

    Raises:
        SandboxUnavailable: this machine cannot lock a process in, or start one; the message
            names the step.
    """

    def __init__(self, workers: int = 1, *, modules: tuple[str, ...] = ()) -> None:
        """Start `workers`; candidates may import `modules` besides the standard library."""
        super().__init__(workers, modules, isolated=True)
        self.info = _describe(self._layers)


class UnsafeNoIsolationSandbox(_Pool):
    """Runs Python that you would run yourself: nothing is locked in, limits and clocks aside.

    Code may read and write every file of the trainer's user, reach the network, and leave
    processes behind. Only for code that is trusted, or a machine that may be lost. Grading is
    as in `CodeSandbox`: another process alone holds the expected values.

    Raises:
        SandboxUnavailable: this is not Linux, or no process can be started.
    """

    def __init__(self, workers: int = 1, *, modules: tuple[str, ...] = ()) -> None:
        """Start `workers`, and say in the log what that means."""
        super().__init__(workers, modules, isolated=False)
        self.info = SandboxInfo("unsafe", self._layers)
        _LOGGER.warning(
            "unsafe_no_isolation: code that a model writes runs with all the rights of user %s",
            os.getuid(),
        )


def fitting_workers(workers: int, jobs: Sequence[Job], memory: int | None) -> int:
    """How many of the workers may run these jobs side by side; at least one.

    Args:
        workers: how many there are.
        jobs: what they will run. A job counts with its limit, one with asserts twice, because
            its tests may need a process of their own, with the same limit.
        memory: bytes that the machine has, see `candidates_at_once`; None: unknown.

    Raises:
        ValueError: one job alone may use more memory than the machine has.
    """
    if memory is None:
        return workers
    for job in jobs:
        if job.limits.memory_bytes > memory:
            raise ValueError(
                f"a job's limit is {job.limits.memory_bytes >> 20} MiB of memory, "
                f"and this machine has {memory >> 20} MiB"
            )
    largest = max((job.limits.memory_bytes * (2 if job.asserts else 1) for job in jobs), default=1)
    return min(workers, candidates_at_once(memory, largest))


class _Batch:
    """Jobs that several workers share; each takes the next one when it is free."""

    def __init__(self, tasks: list[Task]) -> None:
        self._results: dict[int, Result] = {}
        self._count = len(tasks)
        self._waiting = iter(tasks)
        self._lock = threading.Lock()
        self._finished: SimpleQueue[GdpoTuneError | None] = SimpleQueue()

    def run_on(self, worker: Worker) -> None:
        """Take jobs until none is left; called in the worker's thread."""
        outcome: GdpoTuneError | None = SandboxInfraError("a worker's thread has died")
        try:
            with foreseeing():
                worker.run(self._source(), self._results.__setitem__)
            outcome = None
        except GdpoTuneError as error:
            self._stop()
            outcome = error
        finally:
            self._finished.put(outcome)

    def wait(self, workers: int) -> list[Result]:
        """Results in the order of the jobs, when every worker is done with this batch."""
        try:
            outcomes = [self._finished.get() for _ in range(workers)]
        finally:
            self._stop()
        for error in outcomes:
            if error is not None:
                raise error
        return [self._results[index] for index in range(self._count)]

    def _source(self) -> Iterator[Task]:
        while True:
            with self._lock:
                task = next(self._waiting, None)
            if task is None:
                return
            yield task

    def _stop(self) -> None:
        with self._lock:
            self._waiting = iter(())


def _describe(layers: tuple[str, ...]) -> SandboxInfo:
    namespaces = "namespaces" in layers
    landlock = any(layer.startswith("landlock") for layer in layers)
    if namespaces and landlock:
        return SandboxInfo("full", layers)
    if landlock:
        return SandboxInfo("seccomp+landlock", layers)
    return SandboxInfo("seccomp+namespaces" if namespaces else "seccomp", layers)
