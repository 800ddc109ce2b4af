"""Pauses that take no time, for the code under test alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest


def replace_pauses(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], object]) -> None:
    """Have the test, and threads it begins from now on, call `sleep` for `time.sleep`.

    Others, such as the watchdog of an earlier test, would call it again and again.
    """
    _replace_for_test(monkeypatch, "sleep", sleep)


def count_pauses_as_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses the test makes from now on, in a time in which nothing else takes any."""
    pauses: list[float] = []
    replace_pauses(monkeypatch, pauses.append)
    _replace_for_test(monkeypatch, "monotonic", lambda: sum(pauses))
    return pauses


def _replace_for_test(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]
) -> None:
    original = getattr(time, name)
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def choose(*args: Any) -> Any:
        return (original if threading.get_ident() in others else function)(*args)

    monkeypatch.setattr(time, name, choose)
