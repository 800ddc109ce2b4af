"""Waiting for the sweep's directory, its object store and its ledger's database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenacity import Retrying

PATIENCE = 600.0
"""Seconds for which something that stopped answering is asked again."""


def build_retrying(
    patience: float, *, first: float = 1.0, longest: float | None = None, **options: Any
) -> Retrying:
    """Return a retry loop: the first attempt at once, others after pauses that double.

    Args:
        patience: seconds within which the last attempt begins.
        first: seconds of the first pause.
        longest: seconds of the longest pause; None: every pause is as long as the first.
        options: others of `tenacity.Retrying`.
    """
    from tenacity import Retrying, stop_before_delay, wait_exponential  # 30 ms, for asyncio

    pauses = wait_exponential(multiplier=first, max=longest or first)
    return Retrying(stop=stop_before_delay(patience), wait=pauses, **options)
