"""Calls that end in time, even if the called code never returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call, which continues in its own thread if it takes too long.

    The time-out of a socket is not enough: a server may send single bytes for ever.

    Raises:
        TimeoutError: there is no result in time.
        Exception: whatever the call raises.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()
