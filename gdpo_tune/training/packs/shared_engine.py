"""One vLLM for all trials of a pack: it holds their adapters and samples for them in one batch.

A trial that waits for samples gives its turn away. The engine starts a batch once no trial asks for
a turn, with the requests of all that wait: then it has the device for itself, and the batch is as
large as it can be. Each completion has a seed of its own, so the batch decides nothing but time.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gdpo_tune.core import compute_lock
from gdpo_tune.training.live_engine import EngineSource, LiveEngine, OnFinished, SampleRequest

T = TypeVar("T")
_LOGGER = logging.getLogger("gdpo_tune.training")


@dataclass(eq=False)
class _Order:
    """Requests of one trial, and their completions."""

    requests: Sequence[SampleRequest]
    on_finished: OnFinished | None
    outputs: Future[list[Any]] = field(default_factory=Future[list[Any]])


class SharedEngine:
    """The vLLM of a pack, started by the first trial that samples; see the module."""

    def __init__(self, slots: int) -> None:
        """Serve so many trials at once."""
        self._slots = slots
        self._mutex = threading.Lock()
        self._live: LiveEngine | None = None
        self._shares: dict[int, EngineShare] = {}
        self._orders: list[_Order] = []
        self._is_sampling = False
        self._returning = 0
        """Trials that have their samples, and not yet a turn: they belong into the next batch."""
        self._batches = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def build_source(self, largest_rank: int) -> EngineSource:
        """Return where the trials of the pack get their engine."""
        return EngineSource(
            lambda _: self._is_alive(), self._open, self._close_broken, self._slots, largest_rank
        )

    def start_batch(self) -> None:
        """Sample for every trial that waits, unless the engine is busy; this returns at once."""
        with self._mutex:
            live = self._live
            if self._is_sampling or self._returning or not self._orders or live is None:
                return
            orders, self._orders = self._orders, []
            self._is_sampling = True
        batch = self._batches.submit(_sample, live, orders)
        batch.add_done_callback(functools.partial(self._deliver, orders))

    def order(
        self, live: LiveEngine, requests: Sequence[SampleRequest], on_finished: OnFinished | None
    ) -> list[Any]:
        """Sample in the next batch; the calling trial gives its turn away until then.

        Raises:
            RuntimeError: `live` broke, and another engine has taken its place.
        """
        order = _Order(requests, on_finished)
        with self._mutex:
            if live is not self._live:
                raise RuntimeError("the engine that held the trial's adapter has ended")
            self._orders.append(order)
        try:
            with compute_lock.yield_lock():
                return order.outputs.result()
        finally:
            with self._mutex:
                if order in self._orders:  # an error came before the batch
                    self._orders.remove(order)
                else:
                    self._returning -= 1

    def release(self) -> None:
        """Free the place of the calling thread's trial, if it has one, for the next trial."""
        share = self._shares.get(threading.get_ident())
        if share is None:
            return
        try:
            if not share.live.is_broken:
                with compute_lock.yield_lock():
                    share.live.forget_adapter(share.adapter)
        except Exception:  # the engine is broken from now on, and the trial has ended without it
            _LOGGER.exception("vLLM could not forget the adapter of a trial that has ended")
        finally:
            with self._mutex:  # only now may another trial have the number of the adapter
                del self._shares[threading.get_ident()]

    def close(self) -> None:
        """End vLLM, if it was started; no trial may use it."""
        self._batches.shutdown()
        self._close_engine()

    def _close_engine(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def _is_alive(self) -> bool:
        return self._live is not None and not self._live.is_broken

    def _close_broken(self) -> None:
        if not self._is_alive():
            self._close_engine()

    def _open(self, key: object, start: Callable[[], Any], threads: int) -> EngineShare:
        """Return the share of the calling thread's trial, of an engine that runs or starts now."""
        del key  # a pack refuses trials that need another engine
        if self._live is None:
            self._live = LiveEngine(start, threads)
        with self._mutex:
            used = {share.adapter for share in self._shares.values()}
            number = next(n for n in range(1, self._slots + 1) if n not in used)
            share = EngineShare(self, self._live, number)
            self._shares[threading.get_ident()] = share
        return share

    def _deliver(self, orders: Sequence[_Order], batch: Future[list[Any]]) -> None:
        """Give each trial its completions, or the error of the batch."""
        with self._mutex:
            self._is_sampling = False
            self._returning += len(orders)
        error = batch.exception()
        outputs = [] if error else batch.result()
        for order in orders:
            if error:
                order.outputs.set_exception(error)
            else:
                order.outputs.set_result(outputs[: len(order.requests)])
                outputs = outputs[len(order.requests) :]
        self.start_batch()  # if nobody comes back, nobody else gives a turn away


def _sample(live: LiveEngine, orders: Sequence[_Order]) -> list[Any]:
    """Sample for several trials in one batch; return the outputs in their order."""
    owners = [(order, row) for order in orders for row in range(len(order.requests))]

    def pass_on(number: int, output: Any) -> None:
        order, row = owners[number]
        if order.on_finished is not None:
            order.on_finished(row, output)

    return live.generate([r for order in orders for r in order.requests], pass_on)


class EngineShare:
    """The engine of a pack as one trial uses it; see `live_engine.TrialEngine`."""

    def __init__(self, shared: SharedEngine, live: LiveEngine, adapter: int) -> None:
        """Take the place of the adapter with this number."""
        self._shared, self.live, self.adapter = shared, live, adapter

    @property
    def llm(self) -> Any:
        """Return the `LLM` of vLLM, for the engine's thread alone."""
        return self.live.llm

    @property
    def llm_engine(self) -> Any:
        """Engine behind vLLM's `LLM`, as TRL reads it."""
        return self.live.llm_engine

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function in the engine's thread and return its result."""
        return self.live.run(function, *arguments, **keywords)

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished | None = None
    ) -> list[Any]:
        """Sample together with the trials that wait; return vLLM's outputs in their order."""
        return self._shared.order(self.live, requests, on_finished)

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of prompts, which other weights have computed."""
        self.live.reset_prefix_cache()
