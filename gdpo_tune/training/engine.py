"""vLLM in a thread of its own, kept for the next trials of its process.

    engine = kept.open(key, start, threads)           # the kept engine if its key is equal
    outputs = engine.generate(requests, on_finished)  # any mix of seeds and decodings
    engine.run(function, *arguments)                  # all else that touches vLLM's objects
    kept.close()                                      # returns its memory

A thread of its own leaves that of the trainer alone, in which vLLM on a CPU would change how torch
computes. An engine that is kept samples bit for bit as a new one: adapters and caches of earlier
trials are gone, each request has a seed, and a trainer sends its weights before it samples.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gdpo_tune.core.errors import EngineDiedError, EngineMemoryError
from gdpo_tune.core.gpu_memory import CUDA_CONTEXT_BYTES, GIB
from gdpo_tune.training import progress

T = TypeVar("T")
OnFinished = Callable[[int, Any], None]
"""Gets the number of a request and vLLM's `RequestOutput`, in the engine's thread."""
REMAINDER = CUDA_CONTEXT_BYTES
"""Bytes of a GPU that may stay in use after an engine was closed."""


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
        try:
            self.llm = self.run(_start, start, threads)
            self.runner: str = self.run(self.llm.collective_rpc, _name_runner)[0]
            """Model runner with which it samples: V1 or V2."""
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

    def forget(self) -> None:
        """Remove all that a trial has left, its NaN included."""

        def forget() -> None:
            wake_up(self.llm)
            engine = self.llm.llm_engine
            if engine.vllm_config.lora_config is not None:
                for number in engine.list_loras():
                    engine.remove_lora(number)
            forget_prompts(self.llm)
            # A kernel may multiply what lies behind the end of a sequence by 0: 0 x NaN is NaN.
            self.llm.collective_rpc(_clear_cache)

        self.run(forget)

    def close(self) -> None:
        """End vLLM and return its memory.

        Raises:
            EngineMemoryError: much of a GPU stays in use; only the end of the process frees it.
        """
        if not self.is_broken:
            self.run(lambda: self.llm.llm_engine.engine_core.shutdown())
        del self.llm
        self._worker.shutdown()
        gc.collect()  # on a CPU, too: weights and caches are in cycles
        left = _read_reserved()
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


class KeptEngine:
    """The engine of a process, started by the first trial that samples."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._key: object = None

    @property
    def runner(self) -> str:
        """Model runner of the kept engine; empty where none is kept."""
        return "" if self._engine is None else self._engine.runner

    def has(self, key: object) -> bool:
        """Return whether an engine with this key is kept."""
        return self._engine is not None and not self._engine.is_broken and self._key == key

    def open(self, key: object, start: Callable[[], Any], threads: int) -> Engine:
        """Return the kept engine if its key is equal, else another one; see `Engine`.

        `key` names everything on which the engine depends; None equals no key.
        """
        if self._engine is not None and self.has(key):
            self._engine.forget()
        else:
            self.close()
            self._engine, self._key = Engine(start, threads), object() if key is None else key
        return self._engine

    def close(self) -> None:
        """Close the engine, if one is kept; no trial may use it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


PROCESS_ENGINE = KeptEngine()
"""The engine that a process keeps."""


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
