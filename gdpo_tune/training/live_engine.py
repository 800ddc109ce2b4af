"""vLLM in a thread of its own, which a process keeps for its next trial.

    engine = open_engine(key, start, threads)         # the kept one if its key is equal
    outputs = engine.generate(requests, on_finished)  # any mix of adapters, seeds and decodings
    engine.run(function, *arguments)                  # all else that touches vLLM's objects
    close_engine()                                    # returns its memory

Any thread may call an engine; calls run one after the other. A thread of its own leaves that of
the trainer alone, in which vLLM on a CPU would change how torch computes. An engine that is kept
samples bit for bit as a new one: adapters and caches of earlier trials are gone, each request has
a seed, and a trainer sends its weights before it samples. One that has raised is never used again.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from gdpo_tune.core.errors import EngineMemoryError
from gdpo_tune.core.gpu_memory import CONTEXT, GIB

T = TypeVar("T")
OnFinished = Callable[[int, Any], None]
"""Gets the number of a request and vLLM's `RequestOutput`, in the engine's thread."""
REMAINDER = CONTEXT
"""Bytes of a GPU that may stay in use after an engine was closed."""


@dataclass(frozen=True)
class SampleRequest:
    """One completion to sample."""

    prompt: Sequence[int]
    sampling: Any
    """vLLM's `SamplingParams`, with a seed of its own and `n` = 1."""
    adapter: Any = None
    """vLLM's `LoRARequest` of an adapter that was loaded; None: the policy as it is."""


class TrialEngine(Protocol):
    """Engine as one trial uses it: of its process, or a share of one."""

    @property
    def adapter(self) -> int:
        """Number, from 1, under which the engine holds the adapter of the trial."""
        ...

    @property
    def llm(self) -> Any:
        """Return the `LLM` of vLLM, for the engine's thread alone."""
        ...

    @property
    def llm_engine(self) -> Any:
        """Engine behind vLLM's `LLM`, as TRL reads it."""
        ...

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function in the engine's thread and return its result."""
        ...

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished | None = None
    ) -> list[Any]:
        """Sample a completion for each request; see `LiveEngine.generate`."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of prompts, which other weights have computed."""
        ...


@dataclass(frozen=True)
class EngineSource:
    """Where a trial gets its engine."""

    has: Callable[[object], bool]
    """Whether there is an engine with this key."""
    open: Callable[[object, Callable[[], Any], int], TrialEngine]
    """See `open_engine`."""
    close: Callable[[], None]
    """Close an engine that no trial uses."""
    slots: int = 1
    """Trials whose adapters the engine holds, and whose completions it samples at once."""
    largest_rank: int = 0
    """Largest rank of their adapters; 0: that of the trial that starts the engine."""


class LiveEngine:
    """A running vLLM and the only thread that touches it."""

    def __init__(self, start: Callable[[], Any], threads: int) -> None:
        """Start an engine with `start`, which returns vLLM's `LLM`, on so many CPU threads."""
        self.is_broken = False
        self.adapter = 1
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._thread = self._worker.submit(threading.get_ident).result()
        try:
            self.llm = self.run(_start, start, threads)
        except BaseException:
            self._worker.shutdown(wait=False)
            raise

    @property
    def llm_engine(self) -> Any:
        """Engine behind vLLM's `LLM`, as TRL reads it."""
        return self.llm.llm_engine

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function in the engine's thread and return its result.

        If it raises, the engine serves no further trial. A caller that is interrupted leaves the
        call running; the next one waits for it.
        """
        if threading.get_ident() == self._thread:
            return function(*arguments, **keywords)
        _finish_gpu_work()  # of the caller, because threads may compute on different streams
        return self._worker.submit(self._call, function, *arguments, **keywords).result()

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished | None = None
    ) -> list[Any]:
        """Sample a completion for each request in one batch; return vLLM's outputs in their order.

        `on_finished` is called as each of them ends, while others are still being sampled. Without
        requests, vLLM is not asked: of several processes, one may have none left.
        """
        if not requests:
            return []
        return self.run(self._generate, requests, on_finished)

    def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """Call a function with vLLM's network."""
        return self.run(self.llm.apply_model, function)

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of prompts, which other weights have computed."""
        self.run(self.llm.reset_prefix_cache)

    def forget_trial(self) -> None:
        """Remove all that an earlier trial has left, its NaN included."""
        self.run(self._forget_trial, None)

    def forget_adapter(self, number: int) -> None:
        """Remove all that a trial has left beside others, which sample nothing at this moment."""
        self.run(self._forget_trial, number)

    def close(self) -> None:
        """End vLLM and return its memory.

        Raises:
            EngineMemoryError: much of a GPU stays in use; only the end of the process frees it.
        """
        if not self.is_broken:
            self.run(self._shut_down)
        del self.llm
        self._worker.shutdown()
        gc.collect()  # on a CPU, too: weights and caches are in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved()
            if left > REMAINDER:
                raise EngineMemoryError(
                    f"vLLM was closed, and {left / GIB:.1f} GiB of the GPU are still in use: start "
                    "a new process"
                )

    def _call(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        try:
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

    def _forget_trial(self, adapter: int | None) -> None:
        wake_up(self.llm)
        engine = self.llm.llm_engine
        if engine.vllm_config.lora_config is not None:
            for number in engine.list_loras():
                if adapter in (number, None):
                    engine.remove_lora(number)
        self.llm.reset_prefix_cache()
        # A kernel may multiply what lies behind the end of a sequence by 0, and 0 x NaN is NaN.
        self.llm.collective_rpc(_clear_cache)

    def _shut_down(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


_engine: LiveEngine | None = None
_key: object = None


def has_engine(key: object) -> bool:
    """Return whether the process keeps an engine with this key."""
    return _engine is not None and not _engine.is_broken and _key == key


def open_engine(key: object, start: Callable[[], Any], threads: int) -> LiveEngine:
    """Return the engine that the process keeps if its key is equal, else start another one.

    `key` names everything on which the engine depends; None equals no key. See `LiveEngine`.
    """
    global _engine, _key
    if _engine is not None and has_engine(key):
        _engine.forget_trial()
        return _engine
    close_engine()
    _engine = LiveEngine(start, threads)
    _key = object() if key is None else key
    return _engine


def close_engine() -> None:
    """Close the engine that the process keeps, if there is one."""
    global _engine
    if _engine is not None:
        closing, _engine = _engine, None
        closing.close()


OF_PROCESS = EngineSource(has_engine, open_engine, close_engine)
"""The engine that the process keeps."""


def fall_asleep(llm: Any) -> None:
    """Let vLLM give its memory back until it is needed; for the engine's thread alone."""
    llm.sleep(level=1)  # its weights go to the machine's memory


def wake_up(llm: Any) -> None:
    """Give vLLM its memory if it sleeps; for the engine's thread alone."""
    if llm.llm_engine.is_sleeping():
        torch.cuda.empty_cache()  # what a step has left to torch
        llm.wake_up()
        llm.collective_rpc(_clear_cache)  # the memory may hold NaN of a step


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


def _clear_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        # A layer with a recurrent state, as in hybrid policies, has several tensors.
        for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
            tensor.zero_()


def _finish_gpu_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
