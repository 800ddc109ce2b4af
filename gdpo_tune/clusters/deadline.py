"""Calls of other people's code that by itself might never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call, if it comes in time. One that does not goes on in a thread of its own.

    A time-out of a socket is none of a call: a server that sends a byte now and then holds it up
    for ever.

    Raises:
        TimeoutError: it did not come.
        Exception: whatever the call raises.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asks
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
