"""vLLM in a thread of its own, kept for the next trials of its process, one or several at once.

    slot = pool.open(key, start, threads)           # of the kept engine if its key is equal
    outputs = slot.generate(requests, on_finished)  # any mix of adapters, seeds and decodings
    slot.engine.run(function, *arguments)           # all else that touches vLLM's objects
    pool.close()                                    # returns its memory

A thread of its own leaves that of the trainer alone, in which vLLM on a CPU would change how torch
computes. An engine that is kept samples bit for bit as a new one: adapters and caches of earlier
trials are gone, each request has a seed, and a trainer sends its weights before it samples.

Trials that share a process share its engine. A trial that waits for samples yields the compute
lock. Once no trial wants that lock, the engine samples for all that wait in one batch: then it has
the device for itself, and the batch is as large as it can be.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gdpo_tune.core import compute_lock
from gdpo_tune.core.errors import EngineDiedError, EngineMemoryError
from gdpo_tune.core.gpu_memory import CUDA_CONTEXT_BYTES, GIB
from gdpo_tune.training import progress

T = TypeVar("T")
OnFinished = Callable[[int, Any], None]
"""Gets the number of a request and vLLM's `RequestOutput`, in the engine's thread."""
REMAINDER = CUDA_CONTEXT_BYTES
"""Bytes of a GPU that may stay in use after an engine was closed."""
_LOGGER = logging.getLogger("gdpo_tune.training")


@dataclass(frozen=True)
class SampleRequest:
    """One completion to sample."""

    prompt: Sequence[int]
    sampling: Any
    """vLLM's `SamplingParams`, with a seed of its own and `n` = 1."""
    adapter: Any = None
    """vLLM's `LoRARequest` of an adapter that was loaded; None: the policy as it is."""


class Engine:
    """A running vLLM and the only thread that touches it."""

    def __init__(self, start: Callable[[], Any], threads: int) -> None:
        """Start an engine with `start`, which returns vLLM's `LLM`, on `threads` CPU threads."""
        self.is_broken = False
        self.followed: set[object] = set()
        """Names of trained weights whose changes this engine has been seen to follow."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._thread = self._worker.submit(threading.get_ident).result()
        before = _read_reserved()
        try:
            self.llm = self.run(_start, start, threads)
            self.runner: str = self.run(self.llm.collective_rpc, _name_runner)[0]
            """Model runner with which it samples: V1 or V2."""
            self._reserved = _read_reserved() - before
        except BaseException:
            self._worker.shutdown(wait=False)
            raise

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function in the engine's thread and return its result.

        If it raises, the engine serves no further trial. A call whose caller was interrupted ends
        before the next one begins.
        """
        if threading.get_ident() == self._thread:
            return function(*arguments, **keywords)
        _finish_gpu_work()  # of the caller, because threads may compute on different streams
        return self._worker.submit(self._call, function, *arguments, **keywords).result()

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished | None = None
    ) -> list[Any]:
        """Sample a completion for each request in one batch; return vLLM's outputs in their order.

        `on_finished` is called as each of them ends, while others are still being sampled. One of
        several processes may have no requests left.
        """
        return self.run(self._generate, requests, on_finished) if requests else []

    def forget(self, adapter: int | None = None) -> None:
        """Remove all that a trial has left, its NaN included; None: all that any has left."""

        def forget() -> None:
            wake_up(self.llm)
            engine = self.llm.llm_engine
            if engine.vllm_config.lora_config is not None:
                for number in engine.list_loras():
                    if adapter in (number, None):
                        engine.remove_lora(number)
            forget_prompts(self.llm)
            # A kernel may multiply what lies behind the end of a sequence by 0: 0 x NaN is NaN.
            self.llm.collective_rpc(_clear_cache)

        self.run(forget)

    def close(self, *, has_neighbours: bool = False) -> None:
        """End vLLM and return its memory.

        With `has_neighbours`, trials may hold other memory of this process, such as their base.

        Raises:
            EngineMemoryError: much of a GPU stays in use; only the end of the process frees it.
        """
        others = _read_reserved() - self._reserved if has_neighbours else 0
        if not self.is_broken:
            self.run(lambda: self.llm.llm_engine.engine_core.shutdown())
        del self.llm
        self._worker.shutdown()
        gc.collect()  # on a CPU, too: weights and caches are in cycles
        left = _read_reserved() - others
        if left > REMAINDER:
            raise EngineMemoryError(
                f"vLLM was closed, and {left / GIB:.1f} GiB of the GPU are still in use: start "
                "a new process"
            )

    def _call(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        # A start may have to download, or to compile for many minutes.
        watching = progress.ENGINE.watch() if hasattr(self, "llm") else nullcontext()
        try:
            with watching:
                result = function(*arguments, **keywords)
                _finish_gpu_work()
        except BaseException:
            self.is_broken = True
            raise
        return result

    def _generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished | None
    ) -> list[Any]:
        wake_up(self.llm)
        engine, first = self.llm.llm_engine, self.llm.request_counter.counter
        plain_step = engine.step

        def step() -> list[Any]:
            outputs = plain_step()
            progress.ENGINE.note_progress(step=True)
            progress.TRAINING.note_progress()
            for output in outputs:
                if output.finished and on_finished is not None:
                    on_finished(int(output.request_id) - first, output)
            return outputs

        engine.step = step
        try:
            return self.llm.generate(
                [{"prompt_token_ids": list(request.prompt)} for request in requests],
                [request.sampling for request in requests],
                lora_request=[request.adapter for request in requests],
                use_tqdm=False,
            )
        finally:
            del engine.step


@dataclass(frozen=True)
class EngineSlot:
    """Place of one trial in an engine."""

    pool: EnginePool
    engine: Engine
    adapter: int
    """Number, from 1, under which the engine holds the adapter of the trial."""

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished | None = None
    ) -> list[Any]:
        """Sample, maybe with trials that wait; see `Engine.generate`.

        Raises:
            RuntimeError: the engine broke, and another one has taken its place.
        """
        return self.pool.sample(self, requests, on_finished)


@dataclass(eq=False)
class _PendingBatch:
    """Requests of one trial, and their completions."""

    requests: Sequence[SampleRequest]
    on_finished: OnFinished | None
    outputs: Future[list[Any]] = field(default_factory=Future[list[Any]])


class EnginePool:
    """The engine of a process, started by the first trial that samples, and its slots."""

    def __init__(self, slots: int = 1) -> None:
        """Serve `slots` trials at once."""
        self.slots = slots
        self._engine: Engine | None = None
        self._key: object = None
        self._mutex = threading.Lock()
        self._taken: dict[int, EngineSlot] = {}
        """By the thread of its trial."""
        self._pending: list[_PendingBatch] = []
        self._is_sampling = False
        self._returning = 0
        """Trials that have their samples, and not yet the lock: they belong into the next batch."""
        self._batches = ThreadPoolExecutor(1, thread_name_prefix="batches")

    @property
    def runner(self) -> str:
        """Model runner of the kept engine; empty where none is kept."""
        return "" if self._engine is None else self._engine.runner

    def has(self, key: object) -> bool:
        """Return whether an engine with this key is kept.

        Trials that share a process agree in all that a key names.
        """
        is_alive = self._engine is not None and not self._engine.is_broken
        return is_alive and (self.slots > 1 or self._key == key)

    def open(self, key: object, start: Callable[[], Any], threads: int) -> EngineSlot:
        """Return a slot of the kept engine if its key is equal, else of another one; see `Engine`.

        `key` names everything on which the engine depends; None equals no key.
        """
        kept = self._engine if self.has(key) else None
        if kept is None:
            self.close()
            self._engine, self._key = Engine(start, threads), object() if key is None else key
        engine = self._engine
        assert engine is not None
        if self.slots == 1:
            if kept is not None:
                kept.forget()
            return EngineSlot(self, engine, 1)
        with self._mutex:
            used = {slot.adapter for slot in self._taken.values()}
            number = next(n for n in range(1, self.slots + 1) if n not in used)
            slot = self._taken[threading.get_ident()] = EngineSlot(self, engine, number)
        return slot

    def sample(
        self, slot: EngineSlot, requests: Sequence[SampleRequest], on_finished: OnFinished | None
    ) -> list[Any]:
        """Sample for a trial, in the next batch if it has company; see `EngineSlot.generate`."""
        if self.slots == 1:
            return slot.engine.generate(requests, on_finished)
        pending = _PendingBatch(requests, on_finished)
        with self._mutex:
            if slot.engine is not self._engine:
                raise RuntimeError("the engine that held the trial's adapter has ended")
            self._pending.append(pending)
        try:
            with compute_lock.yield_lock():
                return pending.outputs.result()
        finally:
            with self._mutex:
                if pending in self._pending:  # an error came before the batch
                    self._pending.remove(pending)
                else:
                    self._returning -= 1

    def start_batch(self) -> None:
        """Sample for every trial that waits, unless the engine is busy; this returns at once."""
        with self._mutex:
            engine = self._engine
            if self._is_sampling or self._returning or not self._pending or engine is None:
                return
            waiting, self._pending = self._pending, []
            self._is_sampling = True
        batch = self._batches.submit(_sample, engine, waiting)
        batch.add_done_callback(functools.partial(self._deliver, waiting))

    def release(self) -> None:
        """Free the slot of the calling thread's trial, if it has one, for the next trial."""
        slot = self._taken.get(threading.get_ident())
        if slot is None:
            return
        try:
            if not slot.engine.is_broken:
                with compute_lock.yield_lock():
                    slot.engine.forget(slot.adapter)
        except Exception:  # the engine is broken from now on, and the trial has ended without it
            _LOGGER.exception("vLLM could not forget the adapter of a trial that has ended")
        finally:
            with self._mutex:  # only now may another trial have the number of the adapter
                del self._taken[threading.get_ident()]

    def close(self) -> None:
        """Close the engine, if one is kept; no trial may use it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(has_neighbours=self.slots > 1)

    def _deliver(self, waiting: Sequence[_PendingBatch], batch: Future[list[Any]]) -> None:
        """Give each trial its completions, or the error of the batch."""
        with self._mutex:
            self._is_sampling = False
            self._returning += len(waiting)
        error = batch.exception()
        outputs = [] if error else batch.result()
        for pending in waiting:
            if error:
                pending.outputs.set_exception(error)
            else:
                pending.outputs.set_result(outputs[: len(pending.requests)])
                outputs = outputs[len(pending.requests) :]
        self.start_batch()  # if nobody comes back, nobody else yields the lock


PROCESS_ENGINES = EnginePool()
"""The engine that a process keeps where trials run one after the other."""


def fall_asleep(llm: Any) -> None:
    """Let vLLM give its memory back until it is needed; for the engine's thread alone."""
    llm.sleep(level=1)  # its weights go to the machine's memory


def wake_up(llm: Any) -> None:
    """Give vLLM its memory if it sleeps; for the engine's thread alone."""
    if llm.llm_engine.is_sleeping():
        torch.cuda.empty_cache()  # what a step has left to torch
        llm.wake_up()
        llm.collective_rpc(_clear_cache)  # the memory may hold NaN of a step


def forget_prompts(llm: Any) -> None:
    """Empty the cache of prompts, whose entries are of earlier weights; for the engine's thread.

    Raises:
        EngineDiedError: vLLM keeps it, because some completion has not ended.
    """
    if llm.reset_prefix_cache() is not True:
        raise EngineDiedError("vLLM keeps its cache of prompts, of weights that are gone")


def _sample(engine: Engine, waiting: Sequence[_PendingBatch]) -> list[Any]:
    """Sample for several trials in one batch; return the outputs in their order."""
    owners = [(pending, row) for pending in waiting for row in range(len(pending.requests))]

    def pass_on(number: int, output: Any) -> None:
        pending, row = owners[number]
        if pending.on_finished is not None:
            pending.on_finished(row, output)

    return engine.generate([r for pending in waiting for r in pending.requests], pass_on)


def _start(start: Callable[[], Any], threads: int) -> Any:
    set_threads = torch.set_num_threads
    set_threads(threads)
    try:
        return start()
    finally:
        # vLLM on a CPU replaces it; the next trainer sets its threads.
        torch.set_num_threads = set_threads
        # vLLM takes all objects of the process out of the search for garbage.
        gc.unfreeze()


def _name_runner(worker: Any) -> str:
    # The worker knows: vLLM chooses by platform, policy and features, not by its variable alone.
    return "V2" if worker.use_v2_model_runner else "V1"


def _clear_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        # A layer with a recurrent state, as in hybrid policies, has several tensors.
        for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
            tensor.zero_()


def _read_reserved() -> int:
    """Return the bytes of the GPU that tensors of this process hold; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _finish_gpu_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
