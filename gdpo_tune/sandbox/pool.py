"""`CodeSandbox`: workers, each with a thread of its own, and batches for them."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress

from ..core import compute_lock
from ..core.errors import GdpoTuneError, SandboxInfraError, SandboxUnavailable
from ..core.system import count_parallel_candidates, read_machine_memory
from .jobs import Job, Result, Sandbox, SandboxInfo
from .process import ADVICE
from .worker import Worker, encode_job


class _Pool(Sandbox):
    """Workers, isolated or not, and the batches that they share."""

    def __init__(self, workers: int, modules: tuple[str, ...], *, isolated: bool) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers cannot run anything")
        if sys.platform != "linux":
            reason = f"platform: the sandbox needs Linux, this is {sys.platform}"
            raise SandboxUnavailable(f"{reason}; {ADVICE}")
        super().__init__()
        self._memory = read_machine_memory()
        self._workers: dict[int, Worker] = {}
        # NOTE: one thread per worker, because its processes die with the thread that starts them.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"sandbox-{number}")
            for number in range(workers)
        ]
        with ExitStack() as undo:
            undo.callback(self.close)
            self._start_workers(modules, isolated)
            undo.pop_all()

    def run_batch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, each in a fresh process; return one result per job, in their order.

        Raises:
            SandboxInfraError: the sandbox itself failed repeatedly; no job gets a verdict then.
            ValueError, TypeError: a test has neither `assert` nor `raise`, or holds a value that
                cannot be sent; a job's limit exceeds the machine's memory; or this is closed.
            RuntimeError: this is a fork of the process that made this sandbox.
        """
        self._require_open()
        jobs = list(jobs)
        count = count_workers_in_memory(len(self._threads), jobs, self._memory)
        waiting = deque(encode_job(index, job) for index, job in enumerate(jobs))
        results: dict[int, Result] = {}
        with self._submitting:
            self._require_open()
            futures = [
                thread.submit(self._workers[number].run, waiting, results)
                for number, thread in enumerate(self._threads[:count])
            ]
        try:
            with compute_lock.yield_lock():
                wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            waiting.clear()
        _raise_failure(futures, SandboxInfraError, "unforeseen error in the sandbox")
        return [results[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End every process, and jobs that are running without a verdict; idempotent."""
        if os.getpid() != self._owner:
            return
        with self._submitting:
            self._closed = True
        for worker in list(self._workers.values()):
            worker.interrupt()
        for number, thread in enumerate(self._threads):
            with suppress(RuntimeError):  # this thread has ended, or was never started
                thread.submit(self._close_worker, number)
        for thread in self._threads:
            thread.shutdown()

    def _close_worker(self, number: int) -> None:
        # NOTE: before the end of this thread, which would kill half of its processes first.
        if number in self._workers:
            self._workers[number].close()

    def _start_workers(self, modules: tuple[str, ...], isolated: bool) -> None:
        """Start every worker, side by side."""

        def start(number: int) -> None:
            self._workers[number] = Worker(modules, isolated=isolated)

        futures: list[Future[None]] = []
        for number, thread in enumerate(self._threads):
            try:
                futures.append(thread.submit(start, number))
            except RuntimeError as error:
                reason = f"threads: {number} of {len(self._threads)} workers, then: {error}"
                raise SandboxUnavailable(reason) from error
        _raise_failure(futures, SandboxUnavailable, "worker: cannot be started")


class CodeSandbox(_Pool):
    """Runs untrusted Python against tests; a context manager.

    Each worker is two processes, a zygote that forks candidates and a judge, and runs one
    candidate at a time. A batch runs on as many workers as `count_workers_in_memory` allows. All
    processes end with `close`, and with the process that made them, however that ends.
    Candidates may import `modules` besides the standard library.

    Raises:
        SandboxUnavailable: this machine cannot isolate a process, or start one; the message
            names the step.
    """

    def __init__(self, workers: int = 1, *, modules: tuple[str, ...] = ()) -> None:
        super().__init__(workers, modules, isolated=True)
        self.info = _describe_isolation(self._workers[0].layers)


class UnsafeNoIsolationSandbox(_Pool):
    """Runs Python that you would run yourself: only limits and clocks hold.

    Code may read and write every file of the trainer's user, reach the network, and leave
    processes behind. Only for code that is trusted, or a machine that may be lost. Grading is
    as in `CodeSandbox`: another process alone holds the expected values.

    Raises:
        SandboxUnavailable: this is not Linux, or no process can be started.
    """

    def __init__(self, workers: int = 1, *, modules: tuple[str, ...] = ()) -> None:
        super().__init__(workers, modules, isolated=False)
        self.info = SandboxInfo("unsafe", self._workers[0].layers)
        logging.getLogger("gdpo_tune.sandbox").warning(
            "unsafe_no_isolation: code that a model writes runs with all the rights of user %s",
            os.getuid(),
        )


def count_workers_in_memory(workers: int, jobs: Sequence[Job], memory: int | None) -> int:
    """Return how many of the workers may run these jobs at once; at least one.

    Each job counts with its memory limit; one with asserts twice, because its tests may need a
    process of their own, with the same limit. `memory` is in bytes; None if unknown.

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
    return min(workers, count_parallel_candidates(memory, largest))


def _raise_failure(futures: Sequence[Future[None]], kind: type[GdpoTuneError], reason: str) -> None:
    """Raise the first failure; an unforeseen error becomes one of this kind."""
    for future in futures:
        try:
            future.result()
        except GdpoTuneError:
            raise
        except Exception as error:
            raise kind(f"{reason}: {error!r}") from error


def _describe_isolation(layers: tuple[str, ...]) -> SandboxInfo:
    if any(layer.startswith("landlock") for layer in layers):
        return SandboxInfo("full" if "namespaces" in layers else "seccomp+landlock", layers)
    return SandboxInfo("seccomp+namespaces" if "namespaces" in layers else "seccomp", layers)
