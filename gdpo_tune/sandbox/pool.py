"""`CodeSandbox`: workers in threads of their own, and batches for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType

from ..errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from .jobs import Job, Result, SandboxInfo
from .worker import Task, Worker, prepare


class CodeSandbox:
    """Runs untrusted Python against tests; a context manager.

    Each worker is two processes, a zygote that forks candidates and a judge, and takes one
    candidate at a time; total memory is at most workers times a job's limit. All of them end
    with `close`, and with the process that made them, however that ends.

    Raises:
        SandboxUnavailable: this machine cannot lock a process in; the message names the step.
    """

    def __init__(self, workers: int = 1) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers cannot run anything")
        if sys.platform != "linux":
            raise SandboxUnavailable(f"platform: the sandbox needs Linux, this is {sys.platform}")
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        started: SimpleQueue[Worker | GdpoTuneError] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(started,), name=f"sandbox-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        outcomes = [started.get() for _ in self._threads]
        self._workers = [outcome for outcome in outcomes if isinstance(outcome, Worker)]
        for outcome in outcomes:
            if isinstance(outcome, GdpoTuneError):
                self.close()
                raise outcome
        self.info = _describe(self._workers[0].layers)

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in a fresh locked process; one result a job, in their order.

        Raises:
            SandboxInfraError: the sandbox itself failed repeatedly; no job gets a verdict then.
            ValueError, TypeError: a test cannot fail, or holds a value that cannot be sent.
        """
        batch = _Batch([prepare(index, job) for index, job in enumerate(jobs)])
        for _ in self._threads:
            self._batches.put(batch)
        return batch.wait(len(self._threads))

    def close(self) -> None:
        """End every process; idempotent."""
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> CodeSandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _work(self, started: SimpleQueue[Worker | GdpoTuneError]) -> None:
        try:
            worker = _start_worker()
        except GdpoTuneError as error:
            started.put(error)
            return
        started.put(worker)
        try:
            while (batch := self._batches.get()) is not None:
                batch.run_on(worker)
        finally:
            worker.close()


def _start_worker() -> Worker:
    try:
        return Worker()
    except GdpoTuneError:
        raise
    except Exception as error:
        # Somebody waits for this thread's answer, so an error that nobody foresaw must be one too.
        raise SandboxUnavailable(f"worker: cannot be started: {error!r}") from error


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
