"""Proposals from a thread of their own, so that Ray's loop keeps running meanwhile.

A proposal is computed when a slot is free, never earlier. It knows every result that existed when
its computation began. If results arrived meanwhile, it is computed once more with them. So a slow
sampler is late but misses no result, and quick trials cannot delay it twice. A few results beside
many known ones do not count: with a thousand trials some always arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.tuning.search.projection import Projection, Suggestion

BUSY_WAIT_SECONDS = 0.02
"""Time that the loop waits for a proposal; enough for a quick sampler."""
IDLE_WAIT_SECONDS = 0.5
"""Time that the loop waits when no trial runs."""
NEGLIGIBLE_SHARE = 0.01
"""Share of the known records up to which results that arrive meanwhile do not count."""


class Proposals(CloseableResource):
    """Proposals of a projection, computed in one thread.

    All methods are called from one other thread, Ray's loop.
    """

    def __init__(self, projection: Projection) -> None:
        self._projection = projection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proposals")
        self._future: Future[Suggestion] | None = None
        self._repeated = False
        """True if the computation was repeated because results arrived."""
        self._missed: list[tuple[TrialRecord, Mapping[str, Any]]] = []
        """Records and sampler states that arrived during the computation."""

    def observe(self, record: TrialRecord, sampler_state: Mapping[str, Any] | None = None) -> None:
        """Take in a record that is new or has changed, now or after the computation."""
        if self._future is None:
            self._projection.observe(record, sampler_state)
        else:
            self._missed.append((record, sampler_state or {}))

    def poll(self, *, idle: bool) -> Suggestion | None:
        """Return a proposal, or None if it is not ready. `observe` its record before the next call.

        It waits longer if `idle`, which says that no trial runs.

        Raises:
            Exception: an error of the sampler.
        """
        if self._future is None:
            self._future = self._thread.submit(self._projection.propose)
        wait([self._future], IDLE_WAIT_SECONDS if idle else BUSY_WAIT_SECONDS)
        if not self._future.done():
            return None
        suggestion, self._future = self._future.result(), None
        limit = NEGLIGIBLE_SHARE * self._projection.known
        is_current = self._repeated or len(self._missed) <= limit
        if not is_current:
            self._projection.withdraw(suggestion)
        for record, sampler_state in self._missed:
            self._projection.observe(record, sampler_state)
        self._missed.clear()
        self._repeated = not is_current
        return suggestion if is_current else self.poll(idle=idle)

    def abandon(self) -> None:
        """Let the thread end by itself; its proposal is not wanted any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Wait for a computation that still runs, and end the thread."""
        self._thread.shutdown(cancel_futures=True)
