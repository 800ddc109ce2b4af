"""Waiting for what trials cannot do without: the sweep's folder, its store, its ledger's database.

Stdlib only: every part that waits goes by the same clock and the same patience.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

PATIENCE = 600.0
"""Seconds for which what stopped answering is asked again. Whoever needs it waits with it."""


def attempts(
    patience: float, *, first: float = 1.0, longest: float | None = None
) -> Iterator[float]:
    """Seconds since the first attempt, before each one: the first at once, others after a pause.

    Args:
        patience: seconds within which the last attempt begins.
        first: seconds of the first pause; each one is twice the one before.
        longest: seconds of the longest pause; None: all are as the first.
    """
    began, pause = time.monotonic(), first
    yield 0.0
    while time.monotonic() - began + pause <= patience:
        time.sleep(pause)
        yield time.monotonic() - began
        pause = min(2 * pause, longest or first)
