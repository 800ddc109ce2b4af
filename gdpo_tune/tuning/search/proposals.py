"""Proposals beside the loop: a sampler thinks in a thread, while Ray's loop goes on.

A proposal is asked for when a slot is free, never ahead of that, and knows every result that
existed when its asking began. If results came in while the sampler was thinking, it is asked again
with them, once: so a slow sampler is late, but neither blind nor starved by quick trials. Where
they are few beside all that it knew, it is not: a thousand trials always bring some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gdpo_tune.core.closing import Closing
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.tuning.search.projection import Projection, Suggestion

BUSY_WAIT_SECONDS = 0.02
"""Seconds that the loop waits for a proposal, which is enough for a quick sampler."""
IDLE_WAIT_SECONDS = 0.5
"""The same when nothing runs, so that the loop has nothing better to do."""
NEGLIGIBLE_SHARE = 0.01
"""Share of what a sampler knew up to which it need not know what came in meanwhile."""


class Proposals(Closing):
    """The projection, and one thread that asks it. `close` it, or use it as a context manager.

    All methods are called from one thread, Ray's loop.
    """

    def __init__(self, projection: Projection) -> None:
        self._projection = projection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proposals")
        self._asked: Future[Suggestion] | None = None
        self._again = False
        """Whether the sampler was asked again because results came in."""
        self._missed: list[tuple[TrialRecord, Mapping[str, Any]]] = []
        """What happened while the sampler was thinking."""

    def load(self, records: Iterable[tuple[TrialRecord, Mapping[str, Any]]]) -> None:
        """Take in what a ledger holds, before the first proposal."""
        self._projection.load(records)

    def observe(self, record: TrialRecord, sampler_state: Mapping[str, Any] | None = None) -> None:
        """Take in a record that is new or has changed, now or once the sampler is done."""
        if self._asked is None:
            self._projection.observe(record, sampler_state)
        else:
            self._missed.append((record, sampler_state or {}))

    def poll(self, *, idle: bool) -> Suggestion | None:
        """A proposal, or None: not yet, ask again. `observe` its record before the next call.

        Args:
            idle: whether nothing runs.

        Raises:
            Exception: what the sampler raised.
        """
        if self._asked is None:
            self._asked = self._thread.submit(self._projection.propose)
        wait([self._asked], IDLE_WAIT_SECONDS if idle else BUSY_WAIT_SECONDS)
        if not self._asked.done():
            return None
        suggestion, self._asked = self._asked.result(), None
        enough = self._again or len(self._missed) <= NEGLIGIBLE_SHARE * self._projection.known
        if not enough:
            self._projection.withdraw(suggestion)
        for record, sampler_state in self._missed:
            self._projection.observe(record, sampler_state)
        self._missed.clear()
        self._again = not enough
        return suggestion if enough else self.poll(idle=idle)

    def close(self) -> None:
        """Wait for a sampler that is still thinking, and end the thread."""
        self._thread.shutdown(cancel_futures=True)
